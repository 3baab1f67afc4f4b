import warnings

import pytest
import torch

from nvfp4_train.model.kernels.program import PROGRAM, is_fused
from nvfp4_train.numerics.kernels import Backend, loader, use
from tests.support.compiler import needs_compiler
from tests.support.models import document_ids, initialized, tiny_model


@needs_compiler
def test_which_tensors_the_kernels_take():
    assert is_fused(torch.zeros(1))
    assert is_fused(torch.zeros(1, dtype=torch.bfloat16))
    assert not is_fused(torch.zeros(1, dtype=torch.float64))
    assert not is_fused(torch.zeros(1, device="meta"))
    with use(Backend.oracle):
        assert not is_fused(torch.zeros(1))


def test_every_source_is_named():
    named = {path.resolve() for path in (*PROGRAM.sources, *PROGRAM.headers)}
    included = {
        (path.parent / line.split('"')[1]).resolve()
        for path in named
        for line in path.read_text().splitlines()
        if line.startswith('#include "')
    }
    sources = {path for path in PROGRAM.sources[0].parent.iterdir() if path.suffix in {".cpp", ".h"}}
    assert sources | included == named


def test_without_a_compiler_plain_pytorch_computes_after_one_warning(tmp_path, monkeypatch: pytest.MonkeyPatch):
    model, tokens = initialized(tiny_model(pattern="M-")), torch.arange(40)[None]
    with use(Backend.oracle):
        wanted = model(tokens, document_ids=document_ids(40))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    loader.library.cache_clear()
    loader.is_available.cache_clear()
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            got = model(tokens, document_ids=document_ids(40))
    finally:
        loader.library.cache_clear()
        loader.is_available.cache_clear()
    assert ["the model runs in plain PyTorch" in str(warning.message) for warning in caught] == [True]
    assert torch.equal(got, wanted)
