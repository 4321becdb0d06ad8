"""The plan as text and in the log."""

import logging

from tests.plans import V1, plan_of


def test_the_plan_is_one_line_of_values_and_one_line_a_note():
    plan = plan_of("NGRAM", num_steps=3, eagle_topk=1, num_draft_tokens=9)
    first, *rest = plan.describe().split("\n")
    for part in (
        "plan: algorithm=NGRAM",
        "num_steps=3",
        "num_draft_tokens=4",
        "rounds_in_flight=1 (v2)",
        "page_size=16",
    ):
        assert part in first
    assert "draft_model" not in first
    assert len(rest) == len(plan.notes)
    assert any("[override] num_draft_tokens: 9 -> 4 (eagle_topk=1 is a chain" in line for line in rest)
    assert "rounds_in_flight=0 (v1)" in plan_of("NGRAM", engine=V1).describe()


def test_the_plan_is_logged_with_automatic_values_as_info_and_the_rest_as_warnings(caplog):
    plan = plan_of("NGRAM", num_steps=3, eagle_topk=1, num_draft_tokens=9, engine=V1)
    with caplog.at_level(logging.INFO, logger="jaxspec"):
        plan.log()
    assert {record.name for record in caplog.records} == {"jaxspec"}
    assert len(caplog.records) == 1 + len(plan.notes)
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert [text.split()[1] for text in warned] == ["[override]", "[requested]"]
