# Licensed under the Apache License, Version 2.0 (see LICENSE).
"""A tiny policy that speaks valid tool calls and solves some rooms, made by imitation in a minute or two.

    python -m examples.sokoban.warm_start OUT_DIR --train-file outputs/demo/data/train.parquet

Owns the demonstrator (the solver, which errs on purpose), the rendering of its episodes and the imitation. An episode
is rendered as the trainer will read it, by `EpisodeTokenizer`; the loss counts the demonstrator's own tokens only.
Refuses to know: HTTP, reinforcement learning, verl.

The folder holds the model for transformers, verl and vLLM, and in `tokenizer` its tokenizer. They lie apart because
transformers, when it finds both in one folder, cuts text by Qwen's own rule whatever the tokenizer's file says: load it
with `AutoTokenizer.from_pretrained(folder / "tokenizer")`. Made once per set of inputs (`fingerprint`).
"""

import argparse
import hashlib
import json
import random
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM
from transformers import __version__ as transformers_version

from examples import tiny_model
from examples.sokoban import rules, sokoban_env, solver
from recipe.agent_env import agent_dataset
from recipe.agent_env.agent_dataset import AgentDataset, EpisodeSpec, EpisodeTokenizer
from recipe.agent_env.env_service.environment import Message
from recipe.agent_env.prompt_styles.registry import get_prompt_style

TOKENIZER_FOLDER = "tokenizer"
"""Of the tokenizer, under the policy's folder."""

RECORD_FILE = "warm_start.json"
"""Written last into the folder: its presence means that the folder is complete."""

PRE_TOKENIZER_REGEX = r"[^\n]+\n*|\n+"
"""Any line may become one token: a rule, a tool, a call, a row of a map. Episodes are short, and rows that stand at
fixed distances are read sooner than cells whose place has to be counted."""

_NUM_VOCABULARY_EPISODES = 1000

ACTIONS = [entry["function"]["name"] for entry in sokoban_env.TOOLS]


@dataclass(frozen=True, kw_only=True, slots=True)
class WarmStartConfig:
    """What the policy is, and how much it is shown. The defaults make one that solves some rooms, far from all."""

    seed: int = 0
    """Of the demonstrator's errors, the weights and the order of episodes."""

    num_episodes: int = 4000
    """Demonstrated episodes, each in a room of its own as far as there are rooms."""

    num_epochs: int = 1
    """How often each is shown."""

    batch_size: int = 16
    """Episodes per step."""

    learning_rate: float = 2e-3
    """Highest rate of AdamW; rises over the first tenth and falls to nothing."""

    error_rate: float = 0.5
    """Share of the demonstrator's actions that are drawn at random."""

    vocab_size: int = 2048
    """Upper bound of the vocabulary."""

    hidden_size: int = 128
    """Width of the model."""

    num_layers: int = 3
    """Decoder layers."""

    num_heads: int = 4
    """Attention heads."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Demonstration:
    """One episode as text: what was seen and what was done."""

    task_prompt: str
    """System text."""

    tools_schema: list[dict[str, Any]]
    """Of the environment."""

    observations: list[list[Message]]
    """The first one and the answer to each action but the last."""

    actions: list[str]
    """Names of the tools called, one per turn."""

    is_solved: bool
    """Whether the room was solved."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RenderedEpisode:
    """One episode as tokens. P prompt tokens, R response tokens."""

    prompt_ids: list[int]
    """Length P."""

    response_ids: list[int]
    """Length R."""

    response_mask: list[int]
    """Length R; 1 = written by the demonstrator."""


def demonstrate(spec: EpisodeSpec, error_rate: float, rng: random.Random) -> Demonstration:
    """Play one episode with the solver, some of whose actions are replaced by random ones.

    Args:
        spec: Which room.
        error_rate: Share of random actions.
        rng: Draws them.
    """
    env = sokoban_env.SokobanEnv(**spec.env_kwargs)
    observation, _ = env.reset(spec.seed)
    observations: list[list[Message]] = []
    actions: list[str] = []
    is_over = is_cut = False
    plans: dict[rules.Room, solver.Plan | None] = {}
    while not (is_over or is_cut):
        assert not isinstance(observation, str), "the game answers with messages"
        observations.append(observation)
        plan = None
        if rng.random() >= error_rate:
            if env.room not in plans:
                plans[env.room] = solver.solve(env.room)
            plan = plans[env.room]
        # No plan: a box is stuck in a corner, all is lost.
        actions.append(plan[0] if plan else rng.choice(ACTIONS))
        observation, _, is_over, is_cut, _ = env.step(call_message(actions[-1]))
    return Demonstration(
        task_prompt=env.task_prompt,
        tools_schema=env.tools_schema,
        observations=observations,
        actions=actions,
        is_solved=is_over,
    )


def call_message(action: str) -> Message:
    """The assistant message that calls one tool."""
    function = {"name": action, "arguments": "{}"}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "type": "function", "function": function}]}


def reply_text(action: str) -> str:
    """What Qwen2.5 writes to call one tool, the end of its turn included."""
    call = json.dumps({"name": action, "arguments": {}})
    return f"<tool_call>\n{call}\n</tool_call>{tiny_model.END_OF_TURN}"


def make_episode_tokenizer(tokenizer: PreTrainedTokenizerFast) -> EpisodeTokenizer:
    """The product's own way from chat to tokens, without limits."""
    style = get_prompt_style("qwen2_5")(tokenizer)
    return EpisodeTokenizer(
        style,
        max_prompt_length=sys.maxsize,
        max_response_length=1,
        truncation="error",
        max_observation_tokens=None,
    )


def render(demonstration: Demonstration, tokenizer: EpisodeTokenizer) -> RenderedEpisode:
    """Tokens of an episode, put together turn by turn as a rollout does it.

    Raises:
        AssertionError: The reply is not read back as the call that it makes.
    """
    first, *later = demonstration.observations
    tools = demonstration.tools_schema
    prompt_ids, _ = tokenizer.first_prompt(demonstration.task_prompt, first, tools)
    response_ids: list[int] = []
    response_mask: list[int] = []
    for turn, action in enumerate(demonstration.actions):
        reply_ids = tokenizer.style.tokenizer(reply_text(action), add_special_tokens=False)["input_ids"]
        response_ids += reply_ids
        response_mask += [1] * len(reply_ids)
        if turn < len(later):
            observation_ids, _ = tokenizer.observation_delta(later[turn], reply_ids)
            response_ids += observation_ids
            response_mask += [0] * len(observation_ids)
    parsed = tokenizer.style.parse_reply(reply_ids, tools)
    assert parsed.error is None and parsed.message["tool_calls"][0]["function"]["name"] == action
    return RenderedEpisode(prompt_ids=prompt_ids, response_ids=response_ids, response_mask=response_mask)


def build_tokenizer(demonstrations: Sequence[Demonstration], vocab_size: int) -> PreTrainedTokenizerFast:
    """Learn a vocabulary in which each line of what is read and written is one token, as far as `vocab_size` allows."""
    shown = demonstrations[0]
    plain = tiny_model.build_tokenizer([], vocab_size=256 + len(tiny_model.ADDED_TOKENS))
    frame = plain.apply_chat_template(
        [{"role": "system", "content": shown.task_prompt}, *shown.observations[0]],
        tools=shown.tools_schema,
        tokenize=False,
        add_generation_prompt=True,
    )
    turns = [
        f"<tool_response>\n{message['content']}\n</tool_response>{reply_text(action)}"
        for demonstration in demonstrations[:_NUM_VOCABULARY_EPISODES]
        for observation, action in zip(demonstration.observations, demonstration.actions, strict=True)
        for message in observation
    ]
    # Control tokens are no text: a vocabulary that could spell them would let an environment forge turns.
    control = re.compile("|".join(re.escape(text) for text, _ in tiny_model.ADDED_TOKENS))
    texts = [part for text in [frame, *turns] for part in control.split(text) if part]
    return tiny_model.build_tokenizer(texts, vocab_size, pre_tokenizer_regex=PRE_TOKENIZER_REGEX)


def imitate(
    model: Qwen2ForCausalLM, episodes: Sequence[RenderedEpisode], config: WarmStartConfig, show_progress: bool = True
) -> list[float]:
    """Train the model to write what the demonstrator wrote.

    Args:
        model: Changed in place.
        episodes: Shown `config.num_epochs` times, in another order each time.
        config: Batch size, rate, seed.
        show_progress: Whether to print the loss ten times on the way.

    Returns:
        Loss of each step, in nats per token.
    """
    num_steps = config.num_epochs * (len(episodes) // config.batch_size)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.learning_rate, betas=(0.9, 0.98), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, config.learning_rate, total_steps=num_steps + 1, pct_start=0.1
    )
    rng = random.Random(config.seed)
    model.train()
    losses: list[float] = []
    for _ in range(config.num_epochs):
        for batch in _batches(episodes, config.batch_size, rng):
            loss = _imitation_loss(model, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            losses.append(loss.item())
            if show_progress and len(losses) % max(1, num_steps // 10) == 0:
                print(f"  imitation step {len(losses)}/{num_steps}: loss {losses[-1]:.3f}", flush=True)
    return losses


def _batches(
    episodes: Sequence[RenderedEpisode], batch_size: int, rng: random.Random
) -> Iterator[list[RenderedEpisode]]:
    """Full batches in random order, of episodes of like length: padding costs as much as text."""
    shuffled = rng.sample(list(episodes), len(episodes))
    by_length = sorted(shuffled, key=lambda episode: len(episode.prompt_ids) + len(episode.response_ids))
    starts = range(rng.randrange(len(episodes) % batch_size + 1), len(episodes) - batch_size + 1, batch_size)
    for start in rng.sample(starts, len(starts)):
        yield by_length[start : start + batch_size]


def _imitation_loss(model: Qwen2ForCausalLM, batch: Sequence[RenderedEpisode]) -> torch.Tensor:
    """Mean cross-entropy over the demonstrator's tokens."""
    rows = [episode.prompt_ids + episode.response_ids for episode in batch]
    masks = [[0] * len(episode.prompt_ids) + episode.response_mask for episode in batch]
    longest = max(map(len, rows))
    # The padding comes last, so no real token sees it: the causal mask is enough.
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([row + [0] * (longest - len(row)) for row in masks], dtype=torch.bool)
    hidden = model.model(ids).last_hidden_state
    logits = model.lm_head(hidden[:, :-1][mask[:, 1:]])
    return torch.nn.functional.cross_entropy(logits, ids[:, 1:][mask[:, 1:]])


def fingerprint(config: WarmStartConfig, specs: Sequence[EpisodeSpec]) -> str:
    """SHA-256 over all that decides what the policy becomes: options, rooms, code, library versions."""
    digest = hashlib.sha256()
    digest.update(json.dumps(asdict(config), sort_keys=True).encode())
    digest.update(json.dumps([asdict(spec) for spec in specs], sort_keys=True).encode())
    digest.update(f"{torch.__version__} {transformers_version}".encode())
    style_folder = Path(sys.modules[get_prompt_style("qwen2_5").__module__].__file__ or "").parent
    modules = (tiny_model, rules, sokoban_env, solver, agent_dataset, sys.modules[__name__])
    for path in [*(Path(module.__file__ or "") for module in modules), *sorted(style_folder.glob("*.py"))]:
        digest.update(path.read_bytes())
    return digest.hexdigest()


def warm_start(folder: Path, train_file: Path, config: WarmStartConfig, show_progress: bool = True) -> dict[str, Any]:
    """Make the policy, unless the folder already holds the one that these inputs give.

    Args:
        folder: Written anew when its inputs changed.
        train_file: Rows whose rooms are demonstrated; the test rooms are never seen.
        config: What the policy is.
        show_progress: Whether to print on the way.

    Returns:
        The record that lies in the folder: `fingerprint`, `num_parameters`, `demonstrator_success`, `first_loss`,
        `last_loss`, `longest_prompt`, `longest_episode` (tokens), `seconds`, `config`; and `was_cached`.
    """
    dataset = AgentDataset(str(train_file))
    specs = [dataset.spec(i % len(dataset)) for i in range(config.num_episodes)]
    key = fingerprint(config, specs)
    record_path = folder / RECORD_FILE
    if record_path.exists():
        record = json.loads(record_path.read_text())
        if record["fingerprint"] == key:
            return {**record, "was_cached": True}
    started = time.monotonic()
    rng = random.Random(config.seed)
    demonstrations = [demonstrate(spec, config.error_rate, rng) for spec in specs]
    tokenizer = build_tokenizer(demonstrations, config.vocab_size)
    episode_tokenizer = make_episode_tokenizer(tokenizer)
    episodes = [render(demonstration, episode_tokenizer) for demonstration in demonstrations]
    model = tiny_model.build_model(
        tokenizer,
        hidden_size=config.hidden_size,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        seed=config.seed,
    )
    losses = imitate(model, episodes, config, show_progress)

    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokenizer.save_pretrained(folder / TOKENIZER_FOLDER)
    model.save_pretrained(folder)
    record = {
        "fingerprint": key,
        "num_parameters": model.num_parameters(),
        "demonstrator_success": sum(d.is_solved for d in demonstrations) / len(demonstrations),
        "first_loss": losses[0],
        "last_loss": sum(losses[-10:]) / len(losses[-10:]),
        "longest_prompt": max(len(e.prompt_ids) for e in episodes),
        "longest_episode": max(len(e.prompt_ids) + len(e.response_ids) for e in episodes),
        "seconds": round(time.monotonic() - started, 1),
        "config": asdict(config),
    }
    record_path.write_text(json.dumps(record, indent=2) + "\n")
    return {**record, "was_cached": False}


def main() -> None:
    """Parse the command line, make the policy, print its record."""
    parser = argparse.ArgumentParser(prog="python -m examples.sokoban.warm_start", description=__doc__.splitlines()[0])
    parser.add_argument("out_dir", type=Path, help="folder to write")
    parser.add_argument("--train-file", type=Path, required=True, help="rows whose rooms are demonstrated")
    for name, default in asdict(WarmStartConfig()).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    args = vars(parser.parse_args())
    folder, train_file = args.pop("out_dir"), args.pop("train_file")
    print(json.dumps(warm_start(folder, train_file, WarmStartConfig(**args)), indent=2))


if __name__ == "__main__":
    main()
