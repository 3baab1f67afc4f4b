"""What a plan says as text and as values."""

import json
from dataclasses import replace

from nvfp4_train.analysis.plan.calibration import load_efficiency, stored_comparisons
from nvfp4_train.analysis.plan.hardware import load_hardware
from nvfp4_train.analysis.plan.layout import Layout
from nvfp4_train.analysis.plan.planner import Planner
from nvfp4_train.analysis.plan.report import (
    format_calibration,
    format_plan,
    format_search,
    plan_values,
    search_values,
)
from nvfp4_train.analysis.plan.search import Found, Rejected
from nvfp4_train.analysis.plan.step_time import Machine
from nvfp4_train.config.parallel import ActivationCheckpoint
from tests.support.configs import composed

CFG = composed("experiment=demo")
PLANNER = Planner(
    model=CFG.model,
    recipe=CFG.recipe,
    optimizer=CFG.optimizer,
    machine=Machine(hardware=load_hardware("GB200"), efficiency=load_efficiency()),
    total_tokens=CFG.run.tokens,
)
LAYOUT = Layout(dp_shard=4, pp=2, micro_batch_size=1, global_batch_size=16, sequence_length=512)
PLAN = PLANNER.plan(LAYOUT)
KEPT = dict.fromkeys(ActivationCheckpoint, 1e9)
COMPARISONS = stored_comparisons()
FOUND = Found(plans=[PLAN], looked_at=7, rejected=[Rejected(reason="too large", count=6, example="tp 2")])


def test_a_plan_as_text_has_all_its_parts():
    text = format_plan(PLAN, kept=KEPT, comparisons=COMPARISONS)
    for part in ("Stages", "Memory", "Traffic", "Model FLOPs", "Time of a step", "How wrong", "Figures of GB200"):
        assert part in text
    assert "+ embedding" in text
    assert "+ head" in text
    for label in ("measured", "modelled", "published"):
        assert label in text
    assert "fits" in text
    assert "nemotron_3_super, nvfp4_super, 64 GB200" in text


def test_what_does_not_fit_is_said_loudly():
    small = replace(PLAN, machine=replace(PLAN.machine, hardware=replace(PLAN.machine.hardware, memory=1.0)))
    assert "DOES NOT FIT" in format_plan(small, kept=KEPT, comparisons=COMPARISONS)


def test_hardware_without_published_runs_says_so():
    machine = replace(PLAN.machine, hardware=load_hardware("MI355X"))
    text = format_plan(replace(PLAN, machine=machine), kept=KEPT, comparisons=COMPARISONS)
    assert "there is no published run of this one" in text


def test_a_search_as_text():
    text = format_search(FOUND)
    assert "Best layouts of 7" in text
    assert "1." in text
    assert "too large: tp 2" in text
    assert "None of 7 layouts fits" in format_search(replace(FOUND, plans=[]))


def test_the_calibration_as_text():
    text = format_calibration(COMPARISONS)
    assert text.count("nemotron_3_super") == 5
    assert "https://docs.nvidia.com" in text


def test_values_are_plain_and_add_up():
    values = json.loads(json.dumps(plan_values(PLAN, kept=KEPT, comparisons=COMPARISONS)))
    assert values["layout"]["devices"] == 8
    assert values["fits"] is True
    for memory in values["memory_bytes"]:
        assert memory["total"] == sum(memory[kind] for kind in values["memory_labels"])
    assert len(values["calibration"]) == len(COMPARISONS)
    assert values["step_seconds"]["label"] == "modelled"
    assert values["hardware"]["bf16"]["label"] == "published"


def test_values_of_a_search():
    values = json.loads(json.dumps(search_values(FOUND)))
    assert values["looked_at"] == 7
    assert values["layouts"][0]["dp_shard"] == 4
    assert values["rejected"] == [{"reason": "too large", "count": 6, "example": "tp 2"}]
