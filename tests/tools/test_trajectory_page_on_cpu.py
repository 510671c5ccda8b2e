# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""What a trajectory page holds, read back from its HTML without a browser."""

import base64
import json
import re
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from recipe.agent_env.trajectory_page.__main__ import main
from recipe.agent_env.trajectory_page.dumps import DumpError, find_dump_files, read_dumps
from recipe.agent_env.trajectory_page.encoding import EPISODES_PER_CHUNK
from tests.tools.dump_rows import ATTACK, OBSERVATION, PROMPT, REPLY, make_row, write_dump


def unpack(text: str) -> bytes:
    return zlib.decompress(base64.b64decode(text), wbits=-15)


class Page:
    """A page read back."""

    def __init__(self, path: Path):
        self.html = path.read_text(encoding="utf-8")
        match = re.search(r'id="index">([^<]*)<', self.html)
        assert match is not None
        self.index = json.loads(unpack(match.group(1)))
        self.chunks = [unpack(text) for text in re.findall(r'class="chunk">([^<]*)<', self.html)]

    def episode(self, number: int) -> dict[str, Any]:
        chunk = self.chunks[number // EPISODES_PER_CHUNK]
        length = int.from_bytes(chunk[:4], "little")
        header = json.loads(chunk[4 : 4 + length])[number % EPISODES_PER_CHUNK]
        body = chunk[4 + length :]
        assert (4 + length) % 4 == 0

        def array(name: str, dtype: str) -> np.ndarray:
            offset, count = header[name]
            return np.frombuffer(body, dtype, count, offset)

        if "response" not in header:
            return header
        texts = [entry.partition(" ")[2] for entry in self.index["vocabulary"]]
        episode = {**header, "mask": array("mask", "u1")}
        for part in ("prompt", "response"):
            episode[part] = [texts[i] for i in array(part, "<u4")]
        for name, scale in header["scales"].items():
            episode[name] = array(name, "<i2") / 32767 * scale
        return episode


def make_page(tmp_path: Path, rows: list[dict[str, Any]], *options: str) -> Page:
    dump = write_dump(tmp_path / "dump" / "1.jsonl", rows)
    out = tmp_path / "page.html"
    assert main([str(dump), "-o", str(out), *options]) == 0
    return Page(out)


def test_page_holds_tokens_mask_and_numbers(tmp_path):
    row = make_row(3)
    episode = make_page(tmp_path, [row]).episode(0)
    sampled = np.asarray(row["response_mask"], dtype=bool)
    assert episode["prompt"] == PROMPT
    assert episode["response"] == REPLY + OBSERVATION + REPLY
    assert episode["mask"].tolist() == row["response_mask"]
    assert episode["rewards"] == [[3, -0.1], [len(sampled) - 1, 1.0]]
    for name in ("advantages", "returns", "log_probs"):
        np.testing.assert_allclose(episode[name], np.asarray(row[name])[sampled], atol=1e-4)
    np.testing.assert_allclose(episode["log_prob_diffs"], -0.001, atol=1e-7)


def test_list_has_a_column_for_each_filter(tmp_path):
    index = make_page(tmp_path, [make_row(i) for i in range(5)]).index
    columns = index["columns"]
    assert [index["env"][i] for i in columns["env"]] == ["grid-v0", "maze-v0", "grid-v0", "maze-v0", "grid-v0"]
    assert [index["reason"][i] for i in columns["reason"]][:3] == ["max_turn", "terminated", "terminated"]
    assert columns["turns"] == [2] * 5
    assert columns["sampled"] == [2 * len(REPLY)] * 5
    assert columns["ret"] == pytest.approx([0.9] * 5)
    assert columns["success"] == [0.0, 1.0, 1.0, 0.0, 1.0]


def test_text_of_the_environment_is_no_html(tmp_path):
    page = make_page(tmp_path, [make_row(), make_row(1, env_name=ATTACK, failure=ATTACK)], "--title", ATTACK)
    assert ATTACK in page.episode(0)["response"]
    assert page.episode(1)["failure"] == ATTACK
    assert page.index["title"] == ATTACK
    assert "onerror" not in page.html.replace("&lt;img src=x onerror=", "")
    assert page.html.count("<script") == page.html.count("</script>")


def test_page_asks_no_network(tmp_path):
    html = make_page(tmp_path, [make_row()]).html
    addresses = set(re.findall(r"https?://[^\s\"'`)]+", html))
    assert addresses == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in html
    assert not re.search(r"innerHTML|insertAdjacentHTML|document\.write|eval\(", html)


def test_page_placeholders_are_all_filled(tmp_path):
    """A text of an episode that looks like a placeholder is no placeholder."""
    page = make_page(tmp_path, [make_row(env_name="{{script}}")], "--title", "{{chunks}}")
    assert re.findall(r"{{\w+}}", page.html) == ["{{chunks}}"]


def test_episodes_are_spread_over_chunks_in_order(tmp_path):
    page = make_page(tmp_path, [make_row(i, uid=f"u{i}") for i in range(2 * EPISODES_PER_CHUNK + 3)])
    assert len(page.chunks) == 3
    assert page.index["columns"]["seed"] == list(range(2 * EPISODES_PER_CHUNK + 3))
    assert page.episode(2 * EPISODES_PER_CHUNK + 2)["response"] == REPLY + OBSERVATION + REPLY


def test_numbers_that_are_none_are_marked(tmp_path):
    row = make_row()
    row["advantages"][1] = float("nan")
    row["log_probs"][0] = float("-inf")
    episode = make_page(tmp_path, [row]).episode(0)
    assert episode["advantages"][1] < -1.00001 * episode["scales"]["advantages"]
    assert episode["log_probs"][0] < -1.00001 * episode["scales"]["log_probs"]
    assert np.isfinite(episode["scales"]["log_prob_diffs"])


def test_dump_of_texts_only_is_shown_as_texts(tmp_path):
    turns = [{"reply": "push_up()", "observation": "# @ #", "reward": 0.5}]
    rows = [{"turns": turns, "env_name": "game", "seed": 1, "end_reason": "terminated", "input": "Go"}]
    page = make_page(tmp_path, rows)
    assert page.episode(0)["turns"] == [["push_up()", "# @ #", 0.5]]
    assert page.episode(0)["promptText"] == "Go"
    assert page.index["columns"]["ret"] == [0.5]


def test_renderings_of_the_environment_go_along(tmp_path):
    page = make_page(
        tmp_path, [make_row(0, renderings=["<b>0</b>", "", ATTACK]), make_row(1), make_row(2, renderings=[])]
    )
    assert page.episode(0)["renderings"] == ["<b>0</b>", "", ATTACK]
    assert "renderings" not in page.episode(1) and "renderings" not in page.episode(2)
    assert ATTACK not in page.html


def test_failed_episode_without_tokens_shows_its_failure(tmp_path):
    row = make_row(end_reason="failed", failure="the service is gone", response_mask=[], turns=[], acc=None)
    page = make_page(tmp_path, [row])
    assert page.episode(0)["failure"] == "the service is gone"
    assert page.index["columns"]["masked"] == [1]
    assert page.index["columns"]["success"] == [None]


def test_folder_is_read_in_order_of_steps(tmp_path):
    for step in (10, 9, 100):
        write_dump(tmp_path / f"{step}.jsonl", [make_row(step=step)])
    assert [episode.step for episode in read_dumps(find_dump_files([tmp_path]))] == [9, 10, 100]


def test_unfinished_last_line_is_left_out(tmp_path):
    path = write_dump(tmp_path / "1.jsonl", [make_row()])
    with path.open("a") as file:
        file.write('{"turns": [')
    assert len(list(read_dumps([path]))) == 1


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("{broken\n", "line 2: no JSON"),
        ('{"step": 1, "data": {}}\n', "line 2: expected a dumped episode"),
        (json.dumps(make_row(advantages=[1.0])) + "\n", "line 2: ValueError: advantages has 1 entries"),
        (json.dumps(make_row(seed="x")) + "\n", "line 2: ValueError"),
    ],
    ids=["no json", "metrics", "lengths differ", "bad seed"],
)
def test_bad_line_is_named(tmp_path, line, text):
    path = write_dump(tmp_path / "1.jsonl", [make_row()])
    with path.open("a") as file:
        file.write(line)
    with pytest.raises(DumpError, match=text):
        list(read_dumps([path]))


@pytest.mark.parametrize("make", [lambda p: p / "none", lambda p: p], ids=["no folder", "empty folder"])
def test_command_without_dumps_says_how_to_get_them(tmp_path, capsys, make):
    assert main([str(make(tmp_path)), "-o", str(tmp_path / "page.html")]) == 2
    assert "trainer.rollout_data_dir" in capsys.readouterr().err


def test_ids_without_texts_are_read_with_a_tokenizer(tmp_path):
    from tests.prompt_styles.tokenizers import chatml_tokenizer

    ids = chatml_tokenizer()("push the box", add_special_tokens=False)["input_ids"]
    row = {"response_ids": ids, "response_mask": [1] * len(ids), "prompt_ids": ids, "turns": [], "env_name": "game"}
    path = write_dump(tmp_path / "1.jsonl", [row])
    episode = next(iter(read_dumps([path], chatml_tokenizer())))
    assert "".join(episode.response_tokens) == "push the box"


def test_command_imports_neither_torch_nor_verl(tmp_path):
    dump = write_dump(tmp_path / "1.jsonl", [make_row()])
    code = (
        "import sys; from recipe.agent_env.trajectory_page.__main__ import main\n"
        f"assert main([{str(dump)!r}, '-o', {str(tmp_path / 'p.html')!r}]) == 0\n"
        "sys.exit(bool({'torch', 'verl', 'ray', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
