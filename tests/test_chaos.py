"""A small fixed set of `make soak PART=chaos`: real kills, some with the disk lost; and the campaign can fail."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.chaos.chain import Plan
from tests.chaos.hooks import Kill
from tests.chaos.plans import campaign, places
from tests.chaos.sabotage import SABOTAGE
from tests.chaos.table import facts_of, words_of

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.soak
@pytest.mark.slow
def test_chaos_small_campaign_with_kills_and_lost_disks_resumes_bit_exact(tmp_path):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "tests.chaos", "--small", "--json", tmp_path / "told.json"],
        cwd=ROOT, env=os.environ | {"TMPDIR": str(tmp_path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    reported = json.loads((tmp_path / "told.json").read_text())
    assert (
        reported["total"]["mismatches"] == 0 and reported["total"]["kills"] >= 7 and reported["total"]["disk_lost"] >= 4
    )
    assert not [row for row in reported["places"].values() if row["from_nothing"]]
    assert reported["sabotage"] == {"sampler position": True, "a block's seed": True}
    print(done.stdout)


def test_chaos_hooks_install_finds_every_wrapped_function(tmp_path):
    code = (
        "import sys; from pathlib import Path\n"
        "from ml_factory.models.registry import available_models, build_model\n"
        "from tests.chaos import work\n"
        "from tests.chaos.hooks import Hooks, Kill, install\n"
        "[build_model(model) for model in available_models()]\n"
        "install(Hooks(Path(sys.argv[1]), Kill('chunk', 1), lambda: None))\n"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path / "diary"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_chaos_campaign_covers_all_kill_places_and_repeats_by_seed():
    plans = list(campaign(0))
    count = {}
    for plan in plans:
        for name, _ in plan.kills:
            count[name] = count.get(name, 0) + 1
    assert {*places()} <= {*count} and all(count[name] >= 5 for name in places())
    assert (count["in a save"], count["during a resume"], count["twice in a row"]) == (10, 5, 5)
    lost = sum(len(plan.kills) for plan in plans if plan.lossy)
    assert 0.4 < lost / sum(count.values()) < 0.6
    assert (
        [plan.words() for plan in campaign(0)]
        == [plan.words() for plan in plans]
        != [plan.words() for plan in campaign(1)]
    )


def test_chaos_facts_of_failed_plans_lists_failures():
    plan = Plan("lstm", (("lstm", Kill("step", 3)),), 7, False)
    broken = Plan("lstm", (("sabotage", Kill("step", 3)),), 7, False, next(iter(SABOTAGE)))
    minutes_bars = {
        "kills": [["lstm", "step#3", "step 3 of train_lstm"]],
        "mismatches": [],
        "trouble": "",
        "plan": plan.words(),
    }
    assert not facts_of([plan], [minutes_bars], 0, 1.0)["failures"]
    assert not facts_of([plan], [minutes_bars], 0, 1.0, least=1)["failures"]
    assert "1 kills, at least 2 wanted" in facts_of([plan], [minutes_bars], 0, 1.0, least=2)["failures"][0]
    assert facts_of([broken], [minutes_bars], 0, 1.0)["failures"]  # sabotage that makes no difference
    for wrong in ({"mismatches": ["weights"]}, {"trouble": "it died"}, {"kills": []}):
        reported = facts_of([plan], [minutes_bars | wrong], 0, 1.0)
        assert reported["failures"] and "FAILURE lstm seed 7" in words_of(reported)
    assert not facts_of([broken], [minutes_bars | {"mismatches": ["weights"]}], 0, 1.0)["failures"]
