"""What a pipeline schedule costs: microbatches in flight, and time that ranks wait."""

from nvfp4_train.analysis.plan.layout import Layout, Schedule


def in_flight(layout: Layout, *, rank: int) -> float:
    """Return how many microbatches' activations a pipeline rank holds at most, in units of all of its stages.

    GPipe holds all. 1F1B starts as many forwards as ranks follow, and one more. Interleaved starts two for each that
    follows and a round for each further stage of its own, each a part of the rank's blocks. Zero-bubble is
    taken to hold as many as interleaved does.

    Source: https://arxiv.org/abs/2104.04473, section 2.2; https://arxiv.org/abs/2401.10241.
    """
    count = layout.num_microbatches
    if layout.pp == 1:
        return 1.0
    after = layout.pp - 1 - rank
    match layout.schedule:
        case Schedule.gpipe:
            return float(count)
        case Schedule.one_f_one_b:
            return float(min(count, after + 1))
        case Schedule.interleaved | Schedule.zero_bubble:
            stages = layout.num_virtual_stages
            parts = min(count * stages, 2 * after + (stages - 1) * layout.pp + 1)
            return parts / stages


def bubble(layout: Layout) -> float:
    """Return the time that a rank waits, in units of the time that it computes.

    Zero-bubble fills two thirds of the wait with weight gradients.

    Source: as for ``in_flight``.
    """
    if layout.pp == 1:
        return 0.0
    wait = (layout.pp - 1) / (layout.num_virtual_stages * layout.num_microbatches)
    return wait / 3 if layout.schedule is Schedule.zero_bubble else wait
