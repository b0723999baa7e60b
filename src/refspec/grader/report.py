"""Results for programs: JSON, JUnit's XML, and what Gradescope reads.

Each says the same as the terminal does. Pictures are drawn as plain text of 80 columns.
"""

from __future__ import annotations

import io
import re
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console, RenderableType

from refspec.grader.judge import Result
from refspec.grader.limits import Limits

WIDTH = 80


def as_json(results: Sequence[Result], limits: Limits) -> dict[str, Any]:
    """One document for a run."""
    enforced = next((result.not_enforced for result in results if result.not_enforced), ())
    return {
        "results": [_result(result) for result in results],
        "passed": sum(result.verdict == "pass" for result in results),
        "limits": {**asdict(limits), "not_enforced": list(enforced)},
    }


def as_junit(results: Sequence[Result]) -> bytes:
    """A test suite with a case for each exercise; what was not started is skipped."""
    verdicts = [result.verdict for result in results]
    failures, errors, skipped = (
        sum(verdicts.count(verdict) for verdict in kinds)
        for kinds in (("fail", "timeout"), ("error",), ("not_started",))
    )
    suite = ET.Element(
        "testsuite",
        name="refspec",
        tests=str(len(results)),
        failures=str(failures),
        errors=str(errors),
        skipped=str(skipped),
        time=f"{sum(result.seconds for result in results):.3f}",
    )
    for result in results:
        case = ET.SubElement(
            suite,
            "testcase",
            classname=result.exercise.chapter.name,
            name=result.exercise.id,
            time=f"{result.seconds:.3f}",
        )
        if result.verdict == "not_started":
            ET.SubElement(case, "skipped", message=result.headline)
        elif result.verdict != "pass":
            tag = "error" if result.verdict == "error" else "failure"
            problem = ET.SubElement(case, tag, type=result.verdict, message=_for_xml(result.headline))
            problem.text = _for_xml(as_text(result))
        if result.printed:
            ET.SubElement(case, "system-out").text = _for_xml(result.printed)
    suites = ET.Element("testsuites")
    suites.append(suite)
    ET.indent(suites)
    return ET.tostring(suites, encoding="utf-8", xml_declaration=True) + b"\n"


def as_gradescope(results: Sequence[Result]) -> dict[str, Any]:
    """One point for each exercise; see Gradescope's autograder specification."""
    return {
        "execution_time": round(sum(result.seconds for result in results), 3),
        "tests": [
            {
                "name": f"{result.exercise.id}: {result.exercise.title}",
                "score": 1 if result.verdict == "pass" else 0,
                "max_score": 1,
                "status": "passed" if result.verdict == "pass" else "failed",
                "output": as_text(result),
                "output_format": "text",
            }
            for result in results
        ],
    }


def as_text(result: Result) -> str:
    """Everything that the learner is told, in plain text."""
    parts = [result.headline]
    if result.where:
        parts.append(result.where)
    if result.picture is not None:
        parts.append(_drawn(result.picture))
    parts += result.facts
    if result.diagnosis:
        parts.append(result.diagnosis)
    return "\n".join(parts)


def _result(result: Result) -> dict[str, Any]:
    return {
        "id": result.exercise.id,
        "chapter": result.exercise.chapter.name,
        "title": result.exercise.title,
        "verdict": result.verdict,
        "headline": result.headline,
        "where": result.where,
        "picture": None if result.picture is None else _drawn(result.picture),
        "facts": list(result.facts),
        "misconception": result.misconception,
        "diagnosis": result.diagnosis,
        "printed": result.printed,
        "cases": result.cases,
        "seed": result.seed,
        "seconds": round(result.seconds, 3),
    }


def _drawn(picture: RenderableType) -> str:
    console = Console(file=io.StringIO(), width=WIDTH, color_system=None, force_terminal=False, legacy_windows=False)
    with console.capture() as captured:
        console.print(picture)
    return "\n".join(line.rstrip() for line in captured.get().splitlines()).strip("\n")


def _for_xml(text: str) -> str:
    """XML cannot hold every character, not even escaped."""
    return re.sub("[^\t\n -\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text)
