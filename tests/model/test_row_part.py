"""A part of every row needs little of the rest, which the test knows here; ranks exchange it."""

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from nvfp4_train.model.attend import attend
from nvfp4_train.model.documents import Documents, locate_documents, take_part
from nvfp4_train.model.mtp import later_labels, shift_left
from nvfp4_train.model.row_part import RowExchange
from tests.support.models import document_ids

SIZE, PART = 24, 8


def refuse(*_: Any) -> Any:
    raise AssertionError("not needed here")


def exchange_of(whole: Tensor, *, first: int) -> RowExchange:
    """What the holders of the other parts of `whole` [B, S, ...] would give."""

    def preceding(_: Tensor, count: int) -> Tensor:
        padded = torch.cat((torch.zeros_like(whole[:, :count]), whole), dim=1)
        return padded[:, first : first + count]

    def following(_: Tensor, count: int) -> Tensor:
        padded = torch.cat((whole, torch.zeros_like(whole[:, :count])), dim=1)
        return padded[:, first + PART : first + PART + count]

    return RowExchange(
        num_parts=SIZE // PART,
        gather=refuse,
        with_preceding=refuse,
        preceding=preceding,
        following=following,
        carry_forward=lambda value, factor: 10.0 * torch.ones_like(value) + factor,
        carry_backward=lambda value, factor: value + 100.0 * factor,
        sum=lambda number: number * 3,
    )


def held(x: Tensor, documents: Documents, *, window_tokens: int) -> Tensor:
    """The places `seen_keys` of [B, G, S, P], NaN for those before the row."""
    places = documents.seen_keys(window_tokens=window_tokens)
    return F.pad(x, (0, 0, PART, 0), value=math.nan)[:, :, PART + places.start : PART + places.stop].contiguous()


def part_of(ids: Tensor, *, first: int, whole: Tensor | None = None) -> Documents:
    exchange = exchange_of(ids if whole is None else whole, first=first)
    return take_part(locate_documents(ids), first=first, size=PART, exchange=exchange)


IDS = torch.cat((document_ids(5, 12, 7), document_ids(24), document_ids(8, 8, 8)))
RNG = torch.Generator().manual_seed(5)


@pytest.mark.parametrize("first", range(0, SIZE, PART))
@pytest.mark.parametrize("window_tokens", [0, 3, 9, 11])
@pytest.mark.parametrize("knows_spans", [True, False])
def test_queries_of_a_part_see_what_they_see_in_whole_rows(first: int, window_tokens: int, knows_spans: bool):
    query, key, value = (torch.randn(3, heads, SIZE, 8, generator=RNG, dtype=torch.float64) for heads in (4, 2, 2))
    expected = attend(query, key, value, documents=locate_documents(IDS), window_tokens=window_tokens)
    here, part = slice(first, first + PART), part_of(IDS, first=first)
    documents = part if knows_spans else replace(part, spans=None)
    key, value = (held(tensor, part, window_tokens=window_tokens) for tensor in (key, value))
    assert key.shape[2] == {3: PART + 2, 9: 2 * PART}.get(window_tokens, SIZE)
    if not knows_spans:  # a mask does not keep NaN out
        key, value = key.nan_to_num(), value.nan_to_num()
    found = attend(query[:, :, here], key, value, documents=documents, window_tokens=window_tokens)
    torch.testing.assert_close(found, expected[:, :, here], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("first", range(0, SIZE, PART))
def test_positions_and_masks_are_those_of_whole_rows(first: int):
    whole, here = locate_documents(IDS), slice(first, first + PART)
    part = part_of(IDS, first=first)
    assert torch.equal(part.positions, whole.positions[:, here])
    for window_tokens in (4, 11):  # that of the neighbour and of whole rows
        keys, mask = part.seen_keys(window_tokens=window_tokens), part.causal_mask(window_tokens=window_tokens)
        expected = F.pad(whole.causal_mask(window_tokens=window_tokens)[:, here], (PART, 0))
        assert torch.equal(mask, expected[:, :, PART + keys.start : PART + keys.stop])
        blocks = part.block_mask(window_tokens=window_tokens)
        query, key = torch.arange(PART)[:, None], torch.arange(len(keys))
        seen = torch.stack([blocks.mask_mod(torch.tensor(row), torch.tensor(0), query, key) for row in range(3)])
        assert torch.equal(seen, mask)


@pytest.mark.parametrize("first", range(0, SIZE, PART))
@pytest.mark.parametrize("by", [1, 3])
def test_what_stands_later_may_be_held_elsewhere(first: int, by: int):
    labels = torch.arange(3 * SIZE).view(3, SIZE)
    expected = later_labels(labels, locate_documents(IDS), depth=by)[:, first : first + PART]
    part = part_of(IDS, first=first, whole=labels)
    assert torch.equal(later_labels(labels[:, first : first + PART], part, depth=by), expected)
    values = labels[..., None].double()
    part = part_of(IDS, first=first, whole=values)
    shifted = shift_left(values[:, first : first + PART], part, by=by, fill=-1.0)
    expected = shift_left(values, locate_documents(IDS), by=by, fill=-1.0)[:, first : first + PART]
    assert torch.equal(shifted, expected)


def test_the_halo_holds_tokens_of_the_first_document_only():
    whole = torch.arange(3.0 * SIZE).view(3, SIZE, 1) + 1
    assert torch.equal(part_of(IDS, first=0, whole=whole).halo(whole[:, :PART], count=3), torch.zeros(3, 3, 1))
    halo = part_of(IDS, first=PART, whole=whole).halo(whole[:, PART : 2 * PART], count=3)
    assert halo[..., 0].tolist() == [[6.0, 7.0, 8.0], [30.0, 31.0, 32.0], [0.0, 0.0, 0.0]]
    halo = part_of(IDS, first=PART, whole=whole).halo(whole[:, PART : 2 * PART], count=5)
    assert halo[0, :, 0].tolist() == [0.0, 0.0, 6.0, 7.0, 8.0]  # its document begins at the sixth token


def test_states_pass_only_where_a_document_goes_on():
    ones = torch.ones(3, 2)
    part = part_of(IDS, first=PART).part
    assert part.continues.tolist() == [True, True, False]
    assert part.initial_state(ones, total_decay=ones).tolist() == [[11.0] * 2, [11.0] * 2, [0.0] * 2]
    assert part.grad_of_final_state(ones, total_decay=ones).tolist() == [[101.0] * 2, [101.0] * 2, [0.0] * 2]
    assert not part_of(IDS, first=0).part.continues.any()


def test_whole_rows_need_nothing():
    documents, x = locate_documents(IDS), torch.ones(3, SIZE, 2)
    assert documents.halo(x, count=3) is None
    assert documents.with_seen(x, x, window_tokens=3)[0] is x
    assert documents.mean_over_parts(x) is x
    assert part_of(IDS, first=0).mean_over_parts(torch.tensor(2)).item() == 2
