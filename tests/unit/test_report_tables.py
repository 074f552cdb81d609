"""The tables of a report as text."""

import pytest

from isobatch.launch.report.tables import results_table, runs_table, table_beside


def test_a_baseline_stands_beside_the_model() -> None:
    own = {"hr@10": 0.6, "ndcg@10": 0.3, "protocol": "leave-one-out", "popularity_hr@10": 0.2}
    table, rest = table_beside(
        {**own, "popularity_ndcg@10": 0.1, "full_hr@10": 0.5, "ease_lambda": 300}, "recommender"
    )
    assert table == [
        ["", "hr@10", "ndcg@10"],
        ["this model", "0.6000", "0.3000"],
        ["popularity", "0.2000", "0.1000"],
        ["this model, all items", "0.5000", ""],
    ]
    assert rest == {"protocol": "leave-one-out", "ease_lambda": 300}


@pytest.mark.parametrize("metrics", [{}, {"loss": 1.0, "f1_macro": 0.5}, {"loss": 1.0, "ce_loss": 0.5}])
def test_metrics_of_one_version_are_no_table(metrics: dict[str, float]) -> None:
    assert table_beside(metrics, "recommender") == ([], metrics)


def test_runs_stand_side_by_side_with_a_row_for_each_figure() -> None:
    run = dict.fromkeys(("parameters", "trainable_parameters", "peak_memory_bytes", "train_seconds"), 7)
    run |= {"run": "a", "task": "x", "state": "done", "split": "test"}
    rows = runs_table([{**run, "metrics": {"f1_macro": 0.5}}, {**run, "run": "b", "metrics": None}])
    assert rows[:4] == [
        ["run", "a", "b"],
        ["state", "done", "done"],
        ["split", "test", "test"],
        ["f1 macro", "0.5", ""],
    ]


def test_several_runs_have_a_line_each() -> None:
    run = {"run": "a", "task": "classifier", "state": "done", "split": "test", "monitor": "f1_macro"}
    run |= {
        "steps": 1200,
        "train_seconds": 61.2,
        "metrics": {"f1_macro": 0.5, "f1_macro within (95 %)": "0.4 to 0.6"},
    }
    half = {**run, "run": "b", "state": "stopped", "metrics": None, "train_seconds": None}
    assert results_table([run, half])[1:] == [
        ["a", "classifier", "test: f1 macro 0.5", "0.4 to 0.6", "1,200", "61 s"],
        ["b", "classifier", "stopped", "", "1,200", ""],
    ]
    for name, lacks in (("within (95 %)", {"metrics": {"f1_macro": 0.5}}), ("steps", {"steps": None})):
        kept = [head for head in results_table([run, half])[0] if head != name]
        assert results_table([run | lacks, half | lacks])[0] == kept  # no column without a cell
