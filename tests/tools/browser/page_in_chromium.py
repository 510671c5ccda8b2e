# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""The trajectory page in headless Chromium: `pytest tests/tools/browser/page_in_chromium.py`.

Not collected by name, since a machine for training has no browser. A script at the end of the page uses it as a person
would and writes what it saw into the document, which Chromium prints.
"""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from recipe.agent_env.trajectory_page.__main__ import main
from tests.tools.dump_rows import ATTACK, REPLY, make_row, write_dump

FLAGS = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--window-size=1400,900", "--virtual-time-budget=60000", "--dump-dom"),
]

HELPERS = """
const key = (name) => document.dispatchEvent(new KeyboardEvent("keydown", { key: name, bubbles: true }));
const wait = (ms) => new Promise((done) => setTimeout(done, ms));
const until = async (test) => {
  for (let i = 0; i < 400 && !test(); i++) await wait(20);
  if (!test()) throw Error("never: " + test);
};
const at = (id) => document.getElementById(id);
const type = async (id, text) => { at(id).value = text; at(id).dispatchEvent(new Event("input")); await wait(600); };
const texts = (query) => [...document.querySelectorAll(query)].map((node) => node.textContent);
const heading = () => document.querySelector("#facts h2").textContent;
const rows = () => document.querySelectorAll(".item").length;
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("unhandledrejection", (event) => problems.push(String(event.reason)));
addEventListener("securitypolicyviolation", (event) => problems.push("blocked " + event.blockedURI));
window.alert = () => problems.push("alert was called");
"""


def use_page(tmp_path: Path, rows: list[dict[str, Any]], script: str) -> dict[str, Any]:
    """Open a page of these rows and run the body of an async function in it.

    Returns:
        What the script returned; fails when anything in the page failed.
    """
    page = tmp_path / "page.html"
    assert main([str(write_dump(tmp_path / "dump" / "1.jsonl", rows)), "-o", str(page)]) == 0
    driver = f"""<script>{HELPERS}
    (async () => {{
      let seen;
      try {{ await until(() => "ready" in document.body.dataset); seen = await (async () => {{ {script} }})(); }}
      catch (error) {{ problems.push(String(error.stack)); }}
      const box = document.createElement("pre");
      box.id = "seen";
      box.textContent = JSON.stringify({{ seen, problems }});
      document.body.append(box);
    }})();</script></body>"""
    page.write_text(page.read_text(encoding="utf-8").replace("</body>", driver), encoding="utf-8")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert chromium is not None, "no Chromium: apt-get install -y chromium"
    command = [chromium, *FLAGS, f"--user-data-dir={tmp_path / 'profile'}", page.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    match = re.search(r'<pre id="seen">(.*?)</pre>', done.stdout, re.DOTALL)
    assert match is not None, done.stderr[-2000:]
    result = json.loads(html.unescape(match.group(1)))
    assert result["problems"] == []
    return result["seen"]


def test_episode_is_shown_token_by_token(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(0)],
        """const tokens = [...document.querySelectorAll(".block.policy .t")];
        const look = (key) => { setMode(key); return tokens.map((t) => t.style.backgroundColor); };
        return { texts: tokens.map((t) => t.textContent), mask: look("mask"), rewards: look("rewards"),
          advantages: look("advantages"), diffs: look("log_prob_diffs"), paid: texts(".block.policy .side .ret"),
          pills: [...document.querySelectorAll(".t.paid")].map((t) => t.dataset.paid),
          written: [...document.querySelectorAll(".block.env .t")].filter((t) => t.style.backgroundColor).length };""",
    )
    assert seen["texts"] == REPLY * 2
    assert all(seen["mask"]) and all(seen["advantages"][:5]) and all(seen["diffs"])
    assert [bool(c) for c in seen["rewards"]] == [False] * 3 + [True] + [False] * 3 + [True]
    assert seen["paid"] == seen["pills"] == ["−0.1", "+1"]
    assert seen["written"] == 0


def test_text_of_the_environment_runs_nothing(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(0, env_name=ATTACK, failure=ATTACK, env_kwargs={ATTACK: ATTACK})],
        """await type("search", "onerror"); return { images: document.images.length,
          shown: document.querySelector(".block.env").textContent, heading: heading(), hits: texts(".t.hit") };""",
    )
    assert seen["images"] == 0
    assert ATTACK in seen["shown"] and ATTACK in seen["heading"]
    assert seen["hits"] == [ATTACK]


def test_filters_narrow_the_list(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(i) for i in range(12)],
        """const all = rows(); await type("f-env", "1"); const maze = rows();
        document.querySelector("#reasons button").click(); const both = rows();
        at("clear").click(); await wait(300); const cleared = rows();
        await type("f-ret-from", "5"); return { all, maze, both, cleared, none: texts(".empty") };""",
    )
    assert (seen["all"], seen["maze"], seen["both"], seen["cleared"]) == (12, 6, 2, 12)
    assert len(seen["none"]) == 1


def test_keys_move_between_episodes_turns_and_tokens(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(i) for i in range(3)],
        """key("j"); await until(() => texts("#facts .line span").includes("seed 1")); key("n"); key("n");
        const here = texts(".block.here strong"); key("ArrowRight"); const tip = at("tip").textContent;
        key("5"); key("t"); const theme = document.documentElement.dataset.theme;
        key("G"); await until(() => texts("#facts .line span").includes("seed 2"));
        return { here, tip, theme, mode: texts('#modes [aria-pressed="true"]'), hash: location.hash };""",
    )
    assert seen["here"] == ["turn 2"]
    assert "1, sampled" in seen["tip"] and "advantage" in seen["tip"]
    assert seen["theme"] == "dark"
    assert seen["mode"] == ["Log-prob"]
    assert seen["hash"] == "#episode=2&colour=log_probs"


def test_search_finds_text_in_every_chunk(tmp_path):
    rows = [make_row(i) for i in range(100)]
    rows[70]["response_tokens"] = [" needle" if text == " up" else text for text in rows[70]["response_tokens"]]
    seen = use_page(
        tmp_path,
        rows,
        """await type("search", "Move NEEDLE"); return { rows: rows(), heading: texts("#facts .line span")[0],
          hits: texts(".t.hit"), count: at("count").textContent };""",
    )
    assert seen["rows"] == 1 and seen["heading"] == "seed 70"
    assert seen["hits"] == [" move", " needle"] * 2
    assert seen["count"].startswith("1 of 100 episodes")


def test_list_of_ten_thousand_holds_only_what_is_in_sight(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(i) for i in range(10_000)],
        """const first = rows(); key("G"); await until(() => texts("#facts .line span").includes("seed 9999"));
        return { first, last: rows(), count: at("count").textContent };""",
    )
    assert 5 < seen["first"] < 40 and 5 < seen["last"] < 40
    assert seen["count"].startswith("10,000 episodes")


def test_long_episode_makes_tokens_as_they_come_into_sight(tmp_path):
    seen = use_page(
        tmp_path,
        [make_row(0, num_turns=1500)],
        """const before = document.querySelectorAll(".t").length; at("page").scrollTop = 1e9;
        await until(() => document.querySelector("#transcript .block:last-child .t"));
        return { before, whole: at("transcript").textContent.length };""",
    )
    assert seen["before"] < 6000
    assert seen["whole"] > 1500 * len("".join(REPLY))


def test_dump_of_texts_is_shown(tmp_path):
    turns = [{"reply": "push_up()", "observation": "# @ #", "reward": 0.5}]
    seen = use_page(
        tmp_path,
        [{"turns": turns, "env_name": "game", "seed": 1, "end_reason": "terminated", "input": "Go"}],
        """return { blocks: texts(".block .text"), legend: at("legend").textContent,
          disabled: document.querySelectorAll("#modes button:disabled").length };""",
    )
    assert seen["blocks"] == ["Go", "push_up()", "# @ #"]
    assert seen["legend"] == "this dump holds texts only"
    assert seen["disabled"] == 4


def test_rendering_of_the_environment_is_shown_and_can_do_nothing(tmp_path):
    attack = "<p>state</p><script>parent.alert(1)</script><img src=x onerror='parent.alert(2)'>"
    seen = use_page(
        tmp_path,
        [make_row(0, renderings=["#@ #", "", attack])],
        """const frame = document.querySelector(".block.picture iframe"); frame.scrollIntoView();
        await new Promise((done) => { frame.onload = done; setTimeout(done, 5000); }); await wait(500);
        let inside; try { inside = frame.contentDocument; } catch (error) { inside = null; }
        return { labels: texts(".block strong"), start: texts(".block.picture pre"), inside: inside === null,
          sandbox: frame.getAttribute("sandbox"), height: frame.getBoundingClientRect().height };""",
    )
    shown = [label for label in seen["labels"] if label in ("state", "turn 1", "turn 2")]
    assert shown == ["state", "turn 1", "turn 2", "state"]
    assert seen["start"] == ["#@ #"]
    assert seen["inside"] and seen["sandbox"] == "" and seen["height"] > 100


if __name__ == "__main__":
    raise SystemExit(pytest.main([__file__]))
