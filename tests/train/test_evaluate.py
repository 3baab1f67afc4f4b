import torch

from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.data.build import TEXT
from nvfp4_train.engine.base import Forward, LossSum
from nvfp4_train.train.evaluate import Evaluation, ValidationLosses
from tests.support.fake_engine import FakeEngine, FakeValidation, fake_batch


class UnevenValidation(FakeValidation):
    """Three labels in the first row, one in the second."""

    def batches(self, *, num_sequences: int, micro_batch_size: int):
        yield fake_batch(0)
        batch = fake_batch(1)
        batch.labels[:, 1:] = IGNORE_INDEX
        yield batch


class LossByRow(FakeEngine):
    """A label of row r costs 2 + 4 r, in BF16 one less."""

    def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
        labels = batch.num_labels()
        loss = 2 + 4 * batch.tokens[0, 0] - int(forward is Forward.bf16)
        return LossSum(loss_sum=(loss * labels).float(), num_labels=labels)


def test_losses_are_means_over_labels_not_over_batches():
    evaluation = Evaluation(validation={TEXT: UnevenValidation()}, num_sequences=2, micro_batch_size=1)  # type: ignore[dict-item]
    assert evaluation.run(LossByRow()) == ValidationLosses(recipe=(3 * 2 + 6) / 4, bf16=(3 * 1 + 5) / 4)


def test_sums_keep_their_digits_over_many_batches():
    class Many(FakeValidation):
        def batches(self, *, num_sequences: int, micro_batch_size: int):
            yield from (fake_batch(0) for _ in range(3000))

    class Tenth(FakeEngine):
        def evaluate(self, batch: Batch, *, forward: Forward) -> LossSum:
            return LossSum(loss_sum=torch.tensor(1e5 + 0.1), num_labels=torch.tensor(1))

    evaluation = Evaluation(validation={TEXT: Many()}, num_sequences=1, micro_batch_size=1)  # type: ignore[dict-item]
    assert evaluation.run(Tenth()).recipe == float(torch.tensor(1e5 + 0.1))


def test_sets_with_names_have_losses_of_their_own_and_one_over_all_labels():
    sets = {"web": FakeValidation(), "code": UnevenValidation()}
    losses = Evaluation(validation=sets, num_sequences=2, micro_batch_size=1).run(LossByRow())  # type: ignore[arg-type]
    web, code = (3 * 2 + 3 * 6) / 6, (3 * 2 + 6) / 4
    assert losses.metrics() == {
        "val/loss": (6 * web + 4 * code) / 10,
        "val/loss_bf16": (6 * web + 4 * code) / 10 - 1,
        "val/web/loss": web,
        "val/web/loss_bf16": web - 1,
        "val/code/loss": code,
        "val/code/loss_bf16": code - 1,
    }
