import pytest
import torch

from nvfp4_train.data.batch import IGNORE_INDEX, Batch
from nvfp4_train.model import loss


def make_batch() -> Batch:
    return Batch(
        tokens=torch.tensor([[1, 2, 3]]),
        labels=torch.tensor([[2, IGNORE_INDEX, 4]]),
        document_ids=torch.zeros(1, 3, dtype=torch.int32),
        position_ids=torch.arange(3)[None],
        microbatch_index=5,
    )


def test_num_labels_counts_only_labels_that_are_not_ignored():
    assert make_batch().num_labels().item() == 2


def test_to_moves_every_tensor_and_keeps_the_index():
    moved = make_batch().to("meta")
    tensors = (moved.tokens, moved.labels, moved.document_ids, moved.position_ids)
    assert all(tensor.device.type == "meta" for tensor in tensors)
    assert moved.microbatch_index == 5
    assert moved.document_ids.dtype == torch.int32


def test_the_loss_leaves_out_the_labels_that_the_data_do_not_count():
    assert loss.IGNORE_INDEX == IGNORE_INDEX  # two constants, because neither package imports the other


@pytest.mark.gpu
def test_pinned_tensors_are_pinned():
    pinned = make_batch().pin_memory()
    tensors = (pinned.tokens, pinned.labels, pinned.document_ids, pinned.position_ids)
    assert all(tensor.is_pinned() for tensor in tensors)
    assert pinned.microbatch_index == 5
    assert torch.equal(pinned.to("cuda").tokens.cpu(), make_batch().tokens)
