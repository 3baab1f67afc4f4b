import torch

from nvfp4_train.parallel.extra_losses import ExtraLosses


def twice(tensor: torch.Tensor) -> torch.Tensor:
    """A second rank with the same values."""
    return 2 * tensor


def test_without_extra_losses_the_loss_is_summed_alone():
    shapes = []

    def look(tensor: torch.Tensor) -> torch.Tensor:
        shapes.append(tensor.shape)
        return tensor

    extra = ExtraLosses()
    extra.add({})
    assert extra.reduce(torch.tensor(3.0), sum_over_data=look) == (torch.tensor(3.0), {})
    assert shapes == [torch.Size([])]


def test_means_are_over_the_labels_of_all_microbatches_and_ranks():
    extra = ExtraLosses()
    extra.add({"mtp_1": torch.tensor([6.0, 2.0]), "router": torch.tensor([1.0, 4.0])})
    extra.add({"mtp_1": torch.tensor([1.0, 5.0]), "router": torch.tensor([3.0, 4.0])})
    loss, means = extra.reduce(torch.tensor(3.0), sum_over_data=twice)
    assert loss == 6
    assert means == {"mtp_1": torch.tensor(1.0), "router": torch.tensor(0.5)}


def test_the_stages_of_a_pipeline_learn_what_the_last_one_knows():
    first, last = ExtraLosses(), ExtraLosses()
    last.add({"mtp_1": torch.tensor([6.0, 2.0]), "router": torch.tensor([1.0, 4.0])})
    sent: list[torch.Tensor] = []

    def send(tensor: torch.Tensor) -> torch.Tensor:
        sent.append(tensor)
        return tensor

    def receive(tensor: torch.Tensor) -> torch.Tensor:
        assert not tensor.any()
        return tensor + sent[0]

    names = ["mtp_1", "router"]
    losses = [last.share(torch.tensor(3.0), names=names, sum_over_stages=send)]
    losses += [first.share(torch.tensor(0.0), names=names, sum_over_stages=receive)]
    assert losses == [3.0, 3.0]
    for extra in (first, last):
        _, means = extra.reduce(losses[0], sum_over_data=lambda tensor: tensor)
        assert means == {"mtp_1": torch.tensor(3.0), "router": torch.tensor(0.25)}


def test_stages_without_extra_losses_share_the_loss_alone():
    extra = ExtraLosses()
    assert extra.share(torch.tensor(3.0), names=[], sum_over_stages=twice) == 6
    assert extra.reduce(torch.tensor(6.0), sum_over_data=twice) == (torch.tensor(12.0), {})


def test_a_depth_without_labels_is_0():
    extra = ExtraLosses()
    extra.add({"mtp_1": torch.tensor([0.0, 0.0])})
    _, means = extra.reduce(torch.tensor(3.0), sum_over_data=twice)
    assert means == {"mtp_1": torch.tensor(0.0)}
