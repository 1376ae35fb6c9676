"""Recipe resnet50: torchvision's network, its log over kills, broken samples, events, flags."""

import re
import time

from ml_factory.recipes import resnet50


def test_recipe_shows_progress_before_the_first_line_of_its_log(call, monkeypatch):
    def slow(*_, **__):
        time.sleep(2)
        return {"accuracy": 0.5, "test_samples": 2, "best_epoch": 1, "history": [{"accuracy": 0.5}]}

    monkeypatch.setattr(resnet50, "train_resnet50", slow)
    for words in ((), ("--json",)):
        assert re.match(r"training resnet50, \d s so far", call("recipe", "resnet50", "--fake-data", *words)[2])
