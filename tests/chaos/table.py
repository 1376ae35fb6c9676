"""The outcome of a campaign as facts and as a table to read."""

from collections.abc import Sequence

from tests.chaos.chain import Plan


def facts_of(plans: Sequence[Plan], outcomes: Sequence[dict], seed: int, seconds: float, least: int = 0) -> dict:
    """Kills by place with what they resumed from, mismatches, sabotage caught, and all failures in words.

    least : kills that each place must have had; one that was not reached is none.
    """
    places: dict[str, dict] = {}
    caught, failures = {}, []
    for plan, outcome in zip(plans, outcomes, strict=True):
        if plan.broken:
            caught[plan.broken] = bool(outcome["kills"]) and bool(outcome["mismatches"])
            if not caught[plan.broken]:
                failures.append(f"sabotage not seen: {outcome['plan']} {outcome['trouble']}".strip())
            continue
        wrong = bool(outcome["mismatches"] or outcome["trouble"])
        if not outcome["kills"]:
            failures.append(f"{outcome['plan']}: no kill of it happened")
        for name, event, resumed in outcome["kills"]:
            row = places.setdefault(
                name, {"kills": 0, "disk_lost": 0, "from_nothing": 0, "resumed": [], "mismatches": 0}
            )
            row["kills"] += 1
            row["disk_lost"] += plan.lossy
            row["from_nothing"] += resumed == "nothing"
            if resumed == "nothing":  # there was a checkpoint, secured before the kill counted
                failures.append(f"{outcome['plan']}: {event} went on from nothing")
            row["resumed"].append(f"{event} -> {resumed}")
            row["mismatches"] += wrong
        if wrong:
            failures.append(f"{outcome['plan']}: {', '.join(outcome['mismatches'])}{outcome['trouble']}")
    for name in sorted({name for plan in plans if not plan.broken for name, _ in plan.kills if name}):
        if (had := places.get(name, {"kills": 0})["kills"]) < least:
            failures.append(f"{name}: {had} kills, at least {least} wanted")
    total = {key: sum(row[key] for row in places.values()) for key in ("kills", "disk_lost", "mismatches")}
    return {
        "seed": seed,
        "places": places,
        "total": total,
        "sabotage": caught,
        "failures": failures,
        "seconds": seconds,
    }


def words_of(observed: dict) -> str:
    """The same as lines."""
    lines = [f"{'place':<20}{'kills':>6}{'disk lost':>11}{'mismatches':>12}  resumed from"]
    for name, row in sorted(observed["places"].items()):
        steps = sorted({step.split(" -> ")[1] for step in row["resumed"]})
        shown = "; ".join(steps)
        shown = shown if len(shown) <= 110 else f"{shown[:107]}..."
        lines.append(f"{name:<20}{row['kills']:>6}{row['disk_lost']:>11}{row['mismatches']:>12}  {shown}")
    total = observed["total"]
    lines.append(f"{'all':<20}{total['kills']:>6}{total['disk_lost']:>11}{total['mismatches']:>12}")
    for name, seen in observed["sabotage"].items():
        lines.append(f"sabotage {name}: {'seen as a mismatch' if seen else 'NOT SEEN'}")
    lines += [f"FAILURE {failure}" for failure in observed["failures"]]
    return "\n".join([*lines, f"{observed['seconds']:.0f} s"])
