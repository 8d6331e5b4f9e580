"""`outerstep plan --memory`: which settings of a worker fit."""

import json

import pytest
from typer.testing import CliRunner

from outerstep.cli import app
from outerstep.common.quantities import parse_bytes
from outerstep.plan_memory import needs

# Peak memory above an idle process that `python -m benchmarks.memory` measured on a CPU, in GB.
MEASURED = {
    134_105_856: {
        "": 2.58,
        "--optimizer-state 8bit": 1.79,
        "--parameters bf16": 1.75,
        "--parameters bf16 --optimizer-state 8bit": 1.47,
    },
    348_000_000: {"": 6.35, "--parameters bf16 --optimizer-state 8bit": 3.30},
}


def plan(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["plan", *arguments])
    return result.exit_code, result.output


@pytest.mark.parametrize("parameters", MEASURED)
def test_predictions_are_within_a_tenth_of_what_was_measured(parameters: int) -> None:
    found = {each.options: each.training + each.host for each in needs(parameters, on_gpu=False)}
    for options, measured in MEASURED[parameters].items():
        assert found[options] == pytest.approx(measured * 1e9, rel=0.1)


def test_the_first_setting_that_fits_is_named() -> None:
    answers = [
        ("24gb", "64gb", ""),
        ("18gb", "64gb", "--optimizer-state 8bit"),
        ("13gb", "64gb", "--parameters bf16"),
        ("10gb", "64gb", "--parameters bf16 --optimizer-state 8bit"),
        ("24gb", "16gb", None),  # the outer state does not fit
    ]
    for memory, host, options in answers:
        code, output = plan("--params", "1.2e9", "--memory", memory, "--host-memory", host, "--format", "json")
        found = json.loads(output)
        assert (code, found["options"]) == (0, options)
        assert [each["fits"] for each in found["settings"]].count(True) == (
            0 if options is None else 4 - [each["options"] for each in found["settings"]].index(options)
        )


def test_a_model_that_does_not_fit_gets_another_way() -> None:
    code, output = plan("--params", "7e9", "--memory", "24gb", "--host-memory", "64gb")
    assert code == 0
    assert "Nothing fits. The least is 52.5 GB and 105 GB of host memory" in output
    assert 'base = "nf4"' in output


def test_a_cpu_has_one_memory_and_the_outer_state_in_a_file() -> None:
    _, output = plan("--params", "134e6", "--memory", "4gb")
    assert "The worker's defaults fit." in output
    assert "the outer state is in a file" in output
    assert all(each.outer_state == 0 for each in needs(134_000_000, on_gpu=False))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--memory", "24gb"], "--memory needs --params"),
        (["--params", "1e9", "--host-memory", "64gb"], "--host-memory needs --memory"),
        (["--params", "1e9", "--memory", "24"], "not a number of bytes such as 24gb"),
        (["--params", "1e9", "--memory", "24gb", "--up", "10mbit"], "leave out --up"),
        (["--params", "1e9", "--memory", "24gb", "--epochs", "2"], "leave out --epochs"),
    ],
)
def test_what_is_missing_or_too_much_is_said(arguments: list[str], told: str) -> None:
    code, output = plan(*arguments)
    assert code != 0
    assert told in " ".join(output.split())


def test_sizes_in_bytes() -> None:
    assert [parse_bytes(text) for text in ("24gb", "1.5 TB", "80GiB")] == [24 * 10**9, 15 * 10**11, 80 * 2**30]
