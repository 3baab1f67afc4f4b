"""One start of a run: everything is decided, then it is built and trained."""

import json
import signal
from contextlib import ExitStack
from dataclasses import dataclass

from nvfp4_train.config.load import LoadedConfig, load_yaml
from nvfp4_train.config.pattern import LayerKind
from nvfp4_train.data.build import TrainingData, build_data
from nvfp4_train.engine.build import PreparedModel, build_engine
from nvfp4_train.model.mamba_kernels import choose_kernels
from nvfp4_train.parallel.mesh import Mesh
from nvfp4_train.parallel.runtime import Runtime
from nvfp4_train.precision.coverage import coverage_report, format_coverage
from nvfp4_train.train.callback import Callback
from nvfp4_train.train.callbacks.anomaly import StopOnNonFinite
from nvfp4_train.train.callbacks.checkpointing import Checkpointing
from nvfp4_train.train.callbacks.metrics_logging import MetricsLogging
from nvfp4_train.train.callbacks.profiler import Profiler
from nvfp4_train.train.callbacks.stop_signals import StopSignals
from nvfp4_train.train.console import build_console, output, short_count, show_log
from nvfp4_train.train.evaluate import Evaluation
from nvfp4_train.train.pace import Pace
from nvfp4_train.train.resume import Start, resume_data
from nvfp4_train.train.run_folder import RunFolder
from nvfp4_train.train.sinks import Sink, build_sinks
from nvfp4_train.train.trainer import Trainer
from nvfp4_train.train.utilization import Utilization, build_utilization
from nvfp4_train.train.versions import collect_versions


@dataclass(frozen=True, kw_only=True, slots=True)
class Job:
    """What a start of a run is made of.

    Args:
        loaded: The configuration.
        runtime: This rank.
        mesh: All ranks.
        prepared: The model on the meta device.
        folder: The run's folder.
        start: What the run starts from.
        pace: Its schedules and its end.
    """

    loaded: LoadedConfig
    runtime: Runtime
    mesh: Mesh
    prepared: PreparedModel
    folder: RunFolder
    start: Start
    pace: Pace

    @property
    def is_over(self) -> bool:
        """Whether the run has nothing left to do."""
        return self.pace.is_over(self.start.state())

    def say(self, text: str) -> None:
        """Print on rank 0."""
        if self.runtime.is_main:
            output.print(text)

    def announce(self) -> None:
        """Tell the user what is about to happen.

        Raises:
            ValueError: The run starts from another run's checkpoint and its budget is used up already.
        """
        start, state = self.start, self.start.state()
        self.say(f"run {self.folder.path.name} in {self.folder.path}")
        if self.is_over and start.is_own:
            self.say(self._describe_end())
            return
        if start.checkpoint is not None:
            self.say(f"starts from {start.checkpoint}: step {state.step}, {short_count(state.tokens)} tokens")
        if start.differences:
            self.say("\n".join(["changed since then:", *(f"    {difference}" for difference in start.differences)]))
        if self.is_over:
            raise ValueError(
                f"{start.checkpoint} has seen {state.tokens} tokens in {state.step} steps, and this run ends at "
                f"run.tokens={self.pace.run.tokens}, run.stop_after_steps={self.pace.run.stop_after_steps}\n"
                "    fix: raise them; both count from the first step of the first run"
            )
        self.say(f"{short_count(self.prepared.num_parameters)} parameters\n{format_coverage(self.prepared.plan)}")

    def train(self) -> signal.Signals | None:
        """Build everything that takes memory and train; return the signal that stopped the run, if one did."""
        cfg = self.loaded.cfg
        if self.runtime.is_main:
            show_log()
        if LayerKind.mamba in cfg.model.layer_kinds:
            choose_kernels(cfg.model.mamba.kernels, self.mesh.device.type)
        with ExitStack() as stack:
            data = build_data(
                cfg.data,
                batch=cfg.batch,
                run=cfg.run,
                vocab_size=cfg.model.vocab_size,
                dp_rank=self.mesh.dp_rank,
                dp_degree=self.mesh.dp_degree,
            )
            stack.callback(data.close)
            if self.mesh.device.type == "cuda":
                data.loader.pin_memory()
            state = self.start.state()
            state.sequences, changes = resume_data(self.start, data)
            data.check_lasts(run=cfg.run, batch=cfg.batch)
            if changes:
                self.say("\n".join(["the data changed:", *(f"    {change}" for change in changes)]))
            utilization = self._utilization()  # of whole layers, before ranks hold parts of them
            engine = build_engine(
                self.prepared,
                mesh=self.mesh,
                parallel_cfg=cfg.parallel,
                engine_cfg=cfg.engine,
                optimizer_cfg=cfg.optimizer,
                sequence_length=cfg.batch.sequence_length,
            )
            stack.callback(engine.close)
            if self.start.checkpoint is not None:
                engine.load(self.start.checkpoint)
            sinks = self._open_folder(stack) if self.runtime.is_main else []
            signals = StopSignals()
            stack.callback(signals.restore)
            trainer = Trainer(
                engine=engine,
                data=data,
                evaluation=self._evaluation(data),
                pace=self.pace,
                state=state,
                callbacks=[*self._callbacks(data, sinks, utilization), signals],
            )
            trainer.fit(evaluate_first=not self.start.is_own)
        if trainer.stop_reason is not None:
            self.say(f"{trainer.stop_reason}; saved at step {state.step}, the same command continues")
        return signals.received

    def _callbacks(self, data: TrainingData, sinks: list[Sink], utilization: Utilization) -> list[Callback]:
        cfg = self.loaded.cfg
        callbacks: list[Callback] = [
            StopOnNonFinite(),
            MetricsLogging(sinks, interval_steps=cfg.logging.interval_steps, utilization=utilization),
        ]
        if cfg.logging.profile.num_steps:
            folder = self.folder.path / "profile"
            callbacks.append(Profiler(cfg.logging.profile, folder=folder, rank=self.runtime.rank))
        metadata = {
            "config": load_yaml(self.loaded.yaml),
            "versions": collect_versions(),
        }
        start_step = self.start.state().step if self.start.is_own else -1
        checkpoints = self.folder.checkpoints
        callbacks.append(Checkpointing(cfg.checkpoint, folder=checkpoints, metadata=metadata, start_step=start_step))
        return callbacks

    def _open_folder(self, stack: ExitStack) -> list[Sink]:
        """Write what describes the run and open its metrics; rank 0 only."""
        cfg, start = self.loaded.cfg, self.start
        self.folder.write_text("config.yaml", self.loaded.yaml)
        self.folder.write_text("overrides.yaml", "".join(f"- {json.dumps(text)}\n" for text in self.loaded.overrides))
        self.folder.write_json("versions.json", collect_versions())
        self.folder.write_json("model.json", {"num_parameters": self.prepared.num_parameters})
        self.folder.write_lineage(start.lineage)
        self.folder.write_json("coverage.json", coverage_report(self.prepared.plan))
        resume_step = start.state().step if start.is_own else None
        sinks = build_sinks(cfg.logging, folder=self.folder, resume_step=resume_step)
        sinks.append(build_console(progress_bar=cfg.logging.progress_bar, total_tokens=cfg.run.tokens))
        for sink in sinks:
            stack.callback(sink.close)
        return sinks

    def _evaluation(self, data: TrainingData) -> Evaluation:
        cfg = self.loaded.cfg
        return Evaluation(
            validation=data.validation,
            num_sequences=cfg.evaluation.num_sequences,
            micro_batch_size=cfg.batch.micro_batch_size,
        )

    def _utilization(self) -> Utilization:
        return build_utilization(
            self.prepared.model,
            self.prepared.plan,
            sequence_length=self.loaded.cfg.batch.sequence_length,
            device=self.mesh.device,
            num_devices=self.runtime.world_size,
        )

    def _describe_end(self) -> str:
        run, state = self.pace.run, self.start.state()
        if state.tokens >= run.tokens:
            limit, more = f"all {run.tokens:,} tokens of run.tokens", "a larger run.tokens continues it"
        else:
            limit, more = f"run.stop_after_steps={run.stop_after_steps}", "run.stop_after_steps=null continues it"
        return f"nothing to train: the run is finished, it has {limit}; {more}, run.name=NEW_NAME starts another one"
