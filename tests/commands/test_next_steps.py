"""What the parser refuses is followed by where to look, on a line or two."""

from __future__ import annotations

import pytest

from sorl_lightning.cli import main

QUICK = ["fit", "--config", "sorl:quickstart"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["fti"], "there is no command 'fti' (did you mean fit?); sorl --help lists them"),
        (["predict"], "there is no command 'predict'; sorl --help"),
        (["fit"], "name a config, as in sorl fit --config sorl:quickstart"),
        (["fit", "--config", "quickstart.yaml"], "sorl configs lists those that ship"),
        ([*QUICK, "--trainer.max_epoch", "3"], "trainer lists what there is (did you mean --trainer.max_epochs?)"),
        ([*QUICK, "--trainer.max_epochs", "three"], "sorl fit --help trainer lists what there is"),
        ([*QUICK, "--data.environment", "Nope"], "sorl envs lists what ships; a class of your own is MODULE.CLASS"),
        ([*QUICK, "--data.environment", "no.Such"], "sorl envs lists what ships; a class of your own is MODULE.CLASS"),
        ([*QUICK, "--model.objective", "GRPO"], "a class of your own is MODULE.CLASS"),
        ([*QUICK, "--data.environment.chess", "1"], "--data.environment.help TextWorldExpress lists its options"),
        (["demo", "--seeds", "3"], "sorl demo --help lists its options"),
        (["demo", "--seed", "x"], "sorl demo --help lists its options"),
        (["envs", "x"], "sorl envs --help lists its options"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_next_step(arguments: list[str], said: str) -> None:
    with pytest.raises(SystemExit) as stop:
        main(arguments)
    text = str(stop.value.code)
    assert said in text
    assert len(text) < 600
    assert "\n" not in text
