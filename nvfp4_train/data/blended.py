"""From the configuration of token files to the streams of a run."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from nvfp4_train.config.batch import BatchConfig
from nvfp4_train.config.blend import SourceConfig
from nvfp4_train.config.indexed_data import IndexedDataConfig, Order, Packing
from nvfp4_train.config.run import RunConfig
from nvfp4_train.data.best_fit import BestFitTokens, build_best_fit
from nvfp4_train.data.fim import FimRule, FimTokens
from nvfp4_train.data.fingerprint import combined_fingerprint, pairs_fingerprint
from nvfp4_train.data.indexed import IndexedTokens
from nvfp4_train.data.megatron_order import samples_of_source
from nvfp4_train.data.megatron_plan import MegatronPlan
from nvfp4_train.data.megatron_samples import MegatronRequest, MegatronSamples, cached_blend
from nvfp4_train.data.order import PrefixStableOrder
from nvfp4_train.data.packing import PackedTokens
from nvfp4_train.data.plan import UNLIMITED, Phase, Plan
from nvfp4_train.data.rows import Samples
from nvfp4_train.data.source import SourceTokens, TokenStream
from nvfp4_train.data.staging import Staging
from nvfp4_train.data.stream import Feed, MixedStream, Origin, SequenceStream
from nvfp4_train.data.token_files import find_pairs

# Runs of any seed validate on the same sequences, so that their losses can be compared.
_VALIDATION_SEED = 0


@dataclass(frozen=True, kw_only=True)
class _Tokens:
    """A source before it is packed."""

    pairs: list[IndexedTokens]
    tokens: SourceTokens
    fingerprint: str


class BlendedData:
    """Opens what an ``IndexedDataConfig`` names.

    Args:
        cfg: Sources, phases, order and packing.
        run: Budget and seed.
        batch: Sizes of a step.
        vocab_size: Entries of the model's vocabulary.
        cache_dir: Folder of prepared files.
        staging: Where copies of remote files go.
    """

    def __init__(
        self,
        cfg: IndexedDataConfig,
        *,
        run: RunConfig,
        batch: BatchConfig,
        vocab_size: int,
        cache_dir: Path,
        staging: Staging,
    ) -> None:
        self._cfg = cfg
        self._run = run
        self._batch = batch
        self._vocab_size = vocab_size
        self._cache_dir = cache_dir
        self._staging = staging

    def training(self) -> MixedStream:
        """Return the training sequences.

        Raises:
            DataError: A source cannot be used.
        """
        opened = {name: self._open(source.paths) for name, source in self._cfg.sources.items()}
        if self._cfg.order is Order.megatron:
            return self._megatron_training(opened)
        feeds = [self._feed(name, source, opened[name]) for name, source in self._cfg.sources.items()]
        return MixedStream(feeds, plan=lambda origin: self._plan(feeds, opened, origin))

    def validation(self) -> dict[str, SequenceStream]:
        """Return the validation sequences by name.

        Raises:
            DataError: A set cannot be used.
        """
        sets = {}
        if self._cfg.order is Order.megatron and self._cfg.megatron.shares()[1] > 0:
            for name, source in self._cfg.sources.items():
                samples = self._megatron_samples(self._open(source.paths), part=1, num_samples=None)
                sets[name] = SequenceStream(samples, order=samples.endless_order)
        for name, validation in self._cfg.validation.items():
            opened = self._open(validation.paths)
            packed = self._pack(opened.tokens, fingerprint=opened.fingerprint)
            order = PrefixStableOrder(num_samples=packed.num_samples, seed=_VALIDATION_SEED)
            sets[name] = SequenceStream(packed, order=order)
        return sets

    def _open(self, paths: list[str]) -> _Tokens:
        prefixes = find_pairs(paths, staging=self._staging, vocab_size=self._vocab_size)
        pairs = [IndexedTokens(prefix) for prefix in prefixes]
        return _Tokens(pairs=pairs, tokens=SourceTokens(pairs), fingerprint=pairs_fingerprint(pairs))

    def _feed(self, name: str, source: SourceConfig, opened: _Tokens) -> Feed:
        fingerprint: str = opened.fingerprint
        tokens: TokenStream = opened.tokens
        seed = f"{self._run.seed}/{name}"
        if source.fim_rate:
            rule = self._fim_rule(source, seed=seed)
            tokens = FimTokens(tokens, rule=rule)
            fingerprint = combined_fingerprint(fingerprint, repr(rule))
        samples = self._pack(tokens, fingerprint=fingerprint)
        limit = UNLIMITED if source.max_epochs is None else math.floor(source.max_epochs * samples.num_samples)
        length = self._batch.sequence_length
        return Feed(
            name=name,
            samples=samples,
            order=PrefixStableOrder(num_samples=samples.num_samples, seed=seed),
            samples_per_epoch=samples.num_samples,
            fingerprint=combined_fingerprint(fingerprint, length, self._cfg.packing.value, seed),
            limit=limit,
            counts_loss=source.loss,
        )

    def _fim_rule(self, source: SourceConfig, *, seed: str) -> FimRule:
        fim = self._cfg.fim
        assert fim.prefix_token is not None
        assert fim.middle_token is not None
        assert fim.suffix_token is not None
        return FimRule(
            rate=source.fim_rate,
            spm_rate=source.fim_spm_rate,
            prefix=fim.prefix_token,
            middle=fim.middle_token,
            suffix=fim.suffix_token,
            document_end=fim.document_end_token,
            seed=seed,
        )

    def _pack(self, tokens: TokenStream, *, fingerprint: str) -> Samples:
        length = self._batch.sequence_length
        match self._cfg.packing:
            case Packing.concatenate:
                return PackedTokens(
                    tokens,
                    sequence_length=length,
                    vocab_size=self._vocab_size,
                    count_document_ends=self._cfg.count_document_ends,
                )
            case Packing.best_fit:
                return BestFitTokens(
                    tokens,
                    sequence_length=length,
                    vocab_size=self._vocab_size,
                    pad_token=self._cfg.pad_token,
                    table=build_best_fit(
                        tokens, sequence_length=length, fingerprint=fingerprint, cache_dir=self._cache_dir
                    ),
                )

    def _plan(self, feeds: list[Feed], opened: Mapping[str, _Tokens], origin: Origin) -> Plan:
        length = self._batch.sequence_length
        own = self._own_shares(opened)
        phases = []
        for name, phase in self._cfg.phases.items():
            shares = phase.shares()
            end = -(-(phase.end(self._run.tokens) - origin.tokens) // length)
            weights = [(own if shares is None else shares).get(feed.name, 0.0) for feed in feeds]
            phases.append(Phase(name=name, end=max(end, 0), weights=weights))
        # The last blend has no end: a step may reach beyond run.tokens, and a longer run goes on with it.
        last = phases.pop() if phases else Phase(name="run", end=None, weights=[own[feed.name] for feed in feeds])
        phases.append(Phase(name=last.name, end=None, weights=last.weights))
        return Plan(
            phases,
            given=[origin.given.get(feed.name, 0) for feed in feeds],
            limits=[feed.limit for feed in feeds],
        )

    def _own_shares(self, opened: Mapping[str, _Tokens]) -> dict[str, float]:
        sources = self._cfg.sources
        shares = {name: source.tokens if source.weight is None else source.weight for name, source in sources.items()}
        return {
            name: float(opened[name].tokens.num_tokens if share is None else share) for name, share in shares.items()
        }

    def _megatron_training(self, opened: Mapping[str, _Tokens]) -> MixedStream:
        size = self._cfg.megatron.num_samples
        if size is None:
            size = -(-self._run.tokens // self._batch.tokens) * self._batch.global_batch_size
        own = self._own_shares(opened)
        total = math.fsum(own.values())
        weights = [own[name] / total for name in self._cfg.sources]
        alone = len(weights) == 1
        feeds = []
        for (name, source), weight in zip(self._cfg.sources.items(), weights, strict=True):
            wanted = size if alone else samples_of_source(size, weight)
            samples = self._megatron_samples(opened[name], part=0, num_samples=wanted)
            fingerprint = combined_fingerprint(samples.key, weights, size)
            feeds.append(_megatron_feed(name, samples, fingerprint=fingerprint, counts_loss=source.loss))
        if alone:
            blend = [Phase(name="run", end=None, weights=[1.0])]
            return MixedStream(feeds, plan=lambda origin: Plan(blend, given=[0], limits=[feeds[0].limit]))
        sources, indices = cached_blend(weights, num_samples=size, cache_dir=self._cache_dir)
        return MixedStream(feeds, plan=lambda origin: MegatronPlan(sources, indices, num_sources=len(feeds)))

    def _megatron_samples(self, opened: _Tokens, *, part: int, num_samples: int | None) -> MegatronSamples:
        train, validation, test = self._cfg.megatron.shares()
        request = MegatronRequest(
            fingerprint=opened.fingerprint,
            split=(train, validation, test),
            part=part,
            num_samples=num_samples,
            sequence_length=self._batch.sequence_length,
            seed=self._run.seed,
            extra_token=self._cfg.megatron.extra_token,
        )
        return MegatronSamples(
            opened.tokens,
            opened.pairs,
            request=request,
            vocab_size=self._vocab_size,
            count_document_ends=self._cfg.count_document_ends,
            cache_dir=self._cache_dir,
        )


def _megatron_feed(name: str, samples: MegatronSamples, *, fingerprint: str, counts_loss: bool) -> Feed:
    return Feed(
        name=name,
        samples=samples,
        order=samples.order,
        samples_per_epoch=samples.samples_per_epoch,
        fingerprint=fingerprint,
        limit=samples.num_samples,
        counts_loss=counts_loss,
    )
