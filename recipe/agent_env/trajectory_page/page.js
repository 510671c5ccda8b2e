"use strict";
// What the page does: unpack, filter, list, show. No text of an episode is ever parsed as HTML: all goes through
// textContent. The data layout is written down in encoding.py.

const ROW_HEIGHT = 54, TOKENS_PER_SEGMENT = 400, EAGER_TOKENS = 3000, KEPT_CHUNKS = 6, LONG_PROMPT_LINES = 12;
const MODES = [
  { key: "mask", label: "Mask" },
  { key: "rewards", label: "Reward", kind: "signed" },
  { key: "advantages", label: "Advantage", kind: "signed" },
  { key: "returns", label: "Return", kind: "signed" },
  { key: "log_probs", label: "Log-prob", kind: "low" },
  { key: "log_prob_diffs", label: "Δ log-prob", kind: "signed" },
];
const VALUE_LABELS = {
  rewards: "reward", advantages: "advantage", returns: "return", log_probs: "log-prob, trainer",
  log_prob_diffs: "trainer − engine",
};
const CONTROL = /^(<\|[^|]{1,60}\|>|<\/?(tool_call|tool_response|think|tools|s|bos|eos|pad|start_of_turn|end_of_turn)>|\[\/?INST\])$/;

const $ = (id) => document.getElementById(id);
const element = (tag, className, text) => {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
};
const signed = (value, digits = 2) =>
  value === null || Number.isNaN(value) ? "NaN" : (value > 0 ? "+" : value < 0 ? "−" : "") + Math.abs(value).toFixed(digits).replace(/(\.\d*?[1-9])0+$|\.0+$/, "$1");
const signClass = (value) => (value > 0 ? "up" : value < 0 ? "down" : "");
const plural = (count, word) => `${count.toLocaleString("en")} ${word}${count === 1 ? "" : "s"}`;

// ---- Unpacking ----

async function unpack(base64) {
  const letters = atob(base64.trim());
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i++) bytes[i] = letters.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate-raw"));
  return new Response(stream).arrayBuffer();
}

let index, columns, vocabularyText, vocabularyId, chunkTexts;
const chunks = new Map();

async function loadChunk(number) {
  if (chunks.has(number)) return chunks.get(number);
  const buffer = await unpack(chunkTexts[number].textContent);
  const headerLength = new DataView(buffer).getUint32(0, true);
  const headers = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, headerLength)));
  const chunk = { headers, buffer, start: 4 + headerLength };
  chunks.set(number, chunk);
  if (chunks.size > KEPT_CHUNKS) chunks.delete(chunks.keys().next().value);
  return chunk;
}

// One episode: per token of the response `mask`, and one Float64Array per value column (NaN where there is no value).
async function loadEpisode(id) {
  const chunk = await loadChunk(Math.floor(id / index.episodesPerChunk));
  const header = chunk.headers[id % index.episodesPerChunk];
  const array = (Type, place) => new Type(chunk.buffer, chunk.start + place[0], place[1]);
  if (!header.response) return { id, header, isText: true };
  const response = array(Uint32Array, header.response), mask = array(Uint8Array, header.mask);
  const values = {};
  for (const name of index.valueColumns) {
    if (!header[name]) continue;
    const packed = array(Int16Array, header[name]), full = new Float64Array(response.length).fill(NaN);
    let next = 0;
    for (let i = 0; i < mask.length; i++) if (mask[i]) { const v = packed[next++]; full[i] = v === -32768 ? Infinity : (v * header.scales[name]) / 32767; }
    values[name] = full;
  }
  const rewards = new Float64Array(response.length);
  for (const [position, reward] of header.rewards) rewards[position] = reward === null ? Infinity : reward;
  values.rewards = rewards;
  return { id, header, prompt: array(Uint32Array, header.prompt), response, mask, values };
}

// ---- Filters ----

let shown = [], selected = -1, current = null, mode = "mask", searchRun = 0, found = null, chosenReasons = new Set();

const numberOf = (id) => ($(id).value === "" ? null : Number($(id).value));

function passes(id, leaveOut) {
  const c = columns;
  if (found && !found.has(id)) return false;
  if (leaveOut !== "reason" && chosenReasons.size && !chosenReasons.has(c.reason[id])) return false;
  if ($("f-env").value !== "" && c.env[id] !== Number($("f-env").value)) return false;
  const success = $("f-success").value;
  if (success === "none" ? c.success[id] !== null : success !== "" && c.success[id] !== Number(success)) return false;
  const stepFrom = numberOf("f-step-from"), stepTo = numberOf("f-step-to");
  if ((stepFrom !== null && c.step[id] < stepFrom) || (stepTo !== null && c.step[id] > stepTo)) return false;
  if (leaveOut !== "ret") {
    const from = numberOf("f-ret-from"), to = numberOf("f-ret-to");
    if ((from !== null && !(c.ret[id] >= from)) || (to !== null && !(c.ret[id] <= to))) return false;
  }
  return true;
}

function applyFilters() {
  const total = columns.env.length, reasonCounts = new Array(index.reason.length).fill(0), returns = [];
  shown = [];
  for (let id = 0; id < total; id++) {
    if (passes(id, "reason")) reasonCounts[columns.reason[id]]++;
    if (passes(id, "ret") && columns.ret[id] !== null) returns.push(columns.ret[id]);
    if (passes(id)) shown.push(id);
  }
  const [key, direction] = $("sort").value.split("-");
  if (direction) {
    const factor = direction === "desc" ? -1 : 1;
    const value = (id) => (columns[key][id] === null ? -Infinity * factor : columns[key][id]);
    shown.sort((a, b) => { const x = value(a), y = value(b); return x === y ? a - b : x < y ? -factor : factor; });
  }
  drawReasons(reasonCounts);
  drawHistogram(returns);
  const known = shown.map((id) => columns.ret[id]).filter((v) => v !== null);
  const mean = known.length ? known.reduce((a, b) => a + b, 0) / known.length : null;
  const said = shown.map((id) => columns.success[id]).filter((v) => v !== null);
  const rate = said.length ? `, ${Math.round((100 * said.reduce((a, b) => a + b, 0)) / said.length)}% solved` : "";
  $("count").textContent = (shown.length === total ? plural(total, "episode") : `${shown.length.toLocaleString("en")} of ${plural(total, "episode")}`) +
    (mean === null ? "" : `, mean return ${signed(mean)}`) + rate;
  $("rows").style.height = `${shown.length * ROW_HEIGHT}px`;
  const place = shown.indexOf(selected);
  if (place < 0) { $("list").scrollTop = 0; if (shown.length) select(shown[0]); } else scrollToRow(place);
  drawRows();
}

function drawReasons(counts) {
  const box = $("reasons");
  box.replaceChildren(...index.reason.map((name, code) => {
    const button = element("button");
    button.type = "button";
    button.setAttribute("aria-pressed", chosenReasons.has(code));
    button.append(element("span", `dot ${name}`), element("span", "", name), element("b", "", counts[code].toLocaleString("en")));
    button.onclick = () => { chosenReasons.has(code) ? chosenReasons.delete(code) : chosenReasons.add(code); applyFilters(); };
    return button;
  }));
}

function drawHistogram(returns) {
  const box = $("histogram");
  box.replaceChildren();
  let low = Infinity, high = -Infinity;
  for (const v of returns) { if (v < low) low = v; if (v > high) high = v; }
  box.hidden = !(high > low);
  if (box.hidden) return;
  const bins = 28, counts = new Array(bins).fill(0), width = (high - low) / bins;
  for (const v of returns) counts[Math.min(bins - 1, Math.floor((v - low) / width))]++;
  const top = Math.max(...counts), space = "http://www.w3.org/2000/svg";
  const svg = document.createElementNS(space, "svg");
  svg.setAttribute("viewBox", `0 0 ${bins * 10} 34`);
  svg.setAttribute("preserveAspectRatio", "none");
  counts.forEach((count, i) => {
    const group = document.createElementNS(space, "g"), height = count ? 2 + 32 * Math.sqrt(count / top) : 0;
    for (const [name, y, h] of [["hot", 0, 34], ["", 34 - height, height]]) {
      const rect = document.createElementNS(space, "rect");
      for (const [k, v] of Object.entries({ x: i * 10 + 1, y, width: 8, height: h, class: name })) rect.setAttribute(k, v);
      group.append(rect);
    }
    const from = low + i * width, to = from + width, title = document.createElementNS(space, "title");
    title.textContent = `${signed(from)} to ${signed(to)}: ${plural(count, "episode")}`;
    group.append(title);
    group.onclick = () => {
      const round = (v, f) => String(f(v * 1e6) / 1e6), texts = [round(from, Math.floor), round(to, Math.ceil)];
      const isOn = $("f-ret-from").value === texts[0] && $("f-ret-to").value === texts[1];
      [$("f-ret-from").value, $("f-ret-to").value] = isOn ? ["", ""] : texts;
      applyFilters();
    };
    svg.append(group);
  });
  const axis = element("div", "axis");
  axis.append(element("span", "", signed(low)), element("span", "", "return"), element("span", "", signed(high)));
  box.append(svg, axis);
}

// ---- List: only the rows in sight exist ----

function drawRows() {
  const list = $("list"), first = Math.max(0, Math.floor(list.scrollTop / ROW_HEIGHT) - 4);
  const last = Math.min(shown.length, Math.ceil((list.scrollTop + list.clientHeight) / ROW_HEIGHT) + 4);
  const rows = [];
  for (let place = first; place < last; place++) rows.push(row(shown[place], place));
  if (!shown.length) rows.push(element("div", "empty", "No episode passes these filters."));
  $("rows").replaceChildren(...rows);
}

function row(id, place) {
  const c = columns, node = element("div", `item${c.masked[id] ? " masked" : ""}`), reason = index.reason[c.reason[id]];
  node.style.top = `${place * ROW_HEIGHT}px`;
  node.dataset.id = id;
  node.setAttribute("role", "option");
  node.setAttribute("aria-selected", id === selected);
  const top = element("div", "top"), sub = element("div", "sub"), name = element("span", "name", index.env[c.env[id]] + " ");
  if (c.seed[id] !== null) name.append(element("i", "", `seed ${c.seed[id]}`));
  top.append(name);
  if (c.success[id] === 1) top.append(element("span", "ok", "✓"));
  top.append(element("span", `ret ${signClass(c.ret[id])}`, signed(c.ret[id])));
  const size = c.tokens[id] ? `, ${c.tokens[id].toLocaleString("en")} tokens` : "";
  sub.append(element("span", `dot ${reason}`), element("span", "grow", `${reason} · ${plural(c.turns[id], "turn")}${size}`), element("span", "", `step ${c.step[id]}`));
  node.append(top, sub);
  node.onclick = () => select(id);
  return node;
}

function scrollToRow(place) {
  const list = $("list"), top = place * ROW_HEIGHT;
  if (top < list.scrollTop) list.scrollTop = top;
  else if (top + ROW_HEIGHT > list.scrollTop + list.clientHeight) list.scrollTop = top + ROW_HEIGHT - list.clientHeight;
}

async function select(id) {
  selected = id;
  drawRows();
  const episode = await loadEpisode(id);
  if (selected !== id) return;
  current = episode;
  showEpisode();
  remember();
}

function move(by) {
  if (!shown.length) return;
  const place = Math.max(0, Math.min(shown.length - 1, shown.indexOf(selected) + by));
  scrollToRow(place);
  select(shown[place]);
}

// ---- Search through all episodes, a chunk at a time ----

const wanted = () => $("search").value.trim().toLowerCase();

function episodeText(header, chunk) {
  let text = `${header.failure} ${JSON.stringify(header.kwargs)} `;
  if (!header.response) return text + header.turns.map((turn) => turn[0] + turn[1]).join("");
  const places = new Uint32Array(chunk.buffer, chunk.start + header.response[0], header.response[1]);
  const parts = new Array(places.length);
  for (let i = 0; i < places.length; i++) parts[i] = vocabularyText[places[i]];
  return text + parts.join("");
}

async function search() {
  const run = ++searchRun, word = wanted();
  if (!word) { found = null; applyFilters(); if (current) showEpisode(); return; }
  const hits = new Set();
  for (let number = 0; number < chunkTexts.length; number++) {
    const chunk = await loadChunk(number);
    if (run !== searchRun) return;
    chunk.headers.forEach((header, i) => {
      const id = number * index.episodesPerChunk + i;
      const labels = `${index.env[columns.env[id]]} seed ${columns.seed[id]} ${index.reason[columns.reason[id]]} ${index.uid[columns.uid[id]]} `;
      if ((labels + episodeText(header, chunk)).toLowerCase().includes(word)) hits.add(id);
    });
    if (number % 8 === 7) { $("count").textContent = `searching, ${Math.round((100 * number) / chunkTexts.length)}%`; await new Promise((done) => setTimeout(done)); }
    if (run !== searchRun) return;
  }
  found = hits;
  const before = selected;
  applyFilters();
  if (current && selected === before) showEpisode();
}

// ---- An episode ----

const watcher = new IntersectionObserver((entries) => {
  for (const entry of entries) if (entry.isIntersecting) fillSegment(entry.target);
}, { root: $("page"), rootMargin: "800px 0px" });

// The parts of an episode: {kind, label, tokens: vocabulary places, from: position in the response or -1, text}.
function partsOf(episode) {
  const parts = [];
  if (episode.isText) {
    if (episode.header.promptText) parts.push({ kind: "prompt", label: "prompt", text: episode.header.promptText });
    episode.header.turns.forEach(([reply, observation, reward], i) => {
      parts.push({ kind: "policy", label: `turn ${i + 1}`, text: reply, reward });
      if (observation) parts.push({ kind: "env", label: "environment", text: observation });
    });
    return parts;
  }
  // A prompt in a chat format of the <|im_start|> kind is shown message by message.
  const opens = [], prompt = episode.prompt;
  for (let i = 0; i < prompt.length; i++) if (/^<\|(im_start|start_header_id)\|>$|^<start_of_turn>$/.test(vocabularyText[prompt[i]])) opens.push(i);
  if (!opens.length || opens[0] > 0) opens.unshift(0);
  opens.forEach((start, i) => {
    const stop = i + 1 < opens.length ? opens[i + 1] : prompt.length;
    if (stop === start) return;
    const role = stop - start > 1 ? vocabularyText[prompt[start + 1]].trim() : "";
    const isHeader = i === opens.length - 1 && stop - start <= 5;
    parts.push({ kind: "prompt", label: isHeader ? "header" : /^[a-z_]{3,12}$/.test(role) ? role : "prompt", tokens: prompt.subarray(start, stop), from: -1, isHeader });
  });
  const { response, mask, values } = episode;
  for (let start = 0, turn = 0; start < response.length; ) {
    let stop = start;
    while (stop < response.length && !mask[stop] === !mask[start]) stop++;
    const part = { tokens: response.subarray(start, stop), from: start };
    if (mask[start]) { let reward = 0; for (let i = start; i < stop; i++) reward += values.rewards[i]; parts.push({ ...part, kind: "policy", label: `turn ${++turn}`, reward }); }
    else parts.push({ ...part, kind: "env", label: "environment" });
    start = stop;
  }
  return parts;
}

// What the environment itself shows, before the first turn and after each.
function withPictures(parts, pictures) {
  if (!pictures) return parts;
  const all = [];
  let turn = 0;
  const add = () => { const picture = pictures[turn]; if (picture) all.push({ kind: "picture", label: "state", picture }); };
  for (const part of parts) {
    if (part.kind === "policy") { add(); turn++; }
    all.push(part);
  }
  add();
  return all;
}

// HTML of an environment is shown in a frame without scripts, without network and without a way to this page.
function pictureOf(content) {
  if (!/<[a-z][^>]*>/i.test(content)) return element("pre", "", content);
  const frame = element("iframe");
  frame.setAttribute("sandbox", "");
  frame.loading = "lazy";
  frame.title = "state as the environment shows it";
  frame.srcdoc = content;
  return frame;
}

function showEpisode() {
  hideTip();
  cursor = turnAt = -1;
  watcher.disconnect();
  const parts = withPictures(partsOf(current), current.header.renderings), turns = parts.filter((part) => part.kind === "policy");
  drawFacts(turns);
  const available = new Set(["mask", ...Object.keys(current.values || { rewards: 1 })]);
  document.querySelectorAll("#modes button").forEach((button) => { button.disabled = !available.has(button.dataset.key); });
  const blocks = parts.map(block);
  $("transcript").replaceChildren(...blocks);
  $("page").scrollTop = 0;
  let left = EAGER_TOKENS;
  for (const segment of document.querySelectorAll("#transcript .block:not(.folded) .segment")) {
    if ((left -= segment.range[1] - segment.range[0]) < 0) break;
    fillSegment(segment);
  }
  drawLegend();
  const hit = wanted() ? document.querySelector("#transcript [data-hit]") : null;
  if (hit) hit.scrollIntoView({ block: "center" });
}

function drawFacts(turns) {
  const c = columns, id = current.id, reason = index.reason[c.reason[id]], facts = $("facts"), heading = element("h2");
  heading.append(element("span", "", index.env[c.env[id]]));
  const badge = element("span", "badge");
  badge.append(element("span", `dot ${reason}`), element("span", "", reason));
  heading.append(badge);
  if (c.success[id] !== null) heading.append(element("span", "badge", c.success[id] ? "✓ solved" : "not solved"));
  if (c.masked[id]) heading.append(element("span", "badge", "masked: not trained on"));
  heading.append(element("span", `ret ${signClass(c.ret[id])}`, signed(c.ret[id], 3)));
  const line = (...texts) => { const p = element("p", "line"); for (const text of texts) if (text) p.append(element("span", "", text)); return p; };
  const tokens = c.tokens[id] ? [`${plural(c.promptTokens[id], "prompt token")}`, `${plural(c.tokens[id], "response token")}, ${c.sampled[id].toLocaleString("en")} sampled`] : [current.header.turns?.length ? "text only, no tokens in this dump" : "nothing was played"];
  facts.replaceChildren(heading,
    line(c.seed[id] === null ? "" : `seed ${c.seed[id]}`, `step ${c.step[id]}`, `rollout ${c.rollout[id]}`, plural(c.turns[id], "turn"), ...tokens, c.restarts[id] ? plural(c.restarts[id], "restart") : ""));
  const uid = index.uid[c.uid[id]], kwargs = current.header.kwargs;
  const details = element("p", "line");
  if (uid) { const span = element("span", "", "group "); span.append(element("code", "", uid)); details.append(span); }
  if (kwargs && Object.keys(kwargs).length) { const span = element("span"); const text = JSON.stringify(kwargs); span.append(element("code", "", text.length > 200 ? text.slice(0, 200) + "…" : text)); details.append(span); }
  if (details.childNodes.length) facts.append(details);
  if (current.header.failure) facts.append(element("div", "failure", current.header.failure));
  if (turns.length) {
    const strip = element("div");
    strip.id = "strip";
    turns.forEach((turn, i) => {
      const button = element("button", "", turn.reward ? signed(turn.reward) : "·");
      button.type = "button";
      button.title = `Turn ${i + 1}: reward ${signed(turn.reward, 4)}`;
      button.style.background = colour("rewards", turn.reward);
      button.onclick = () => goToTurn(i);
      strip.append(button);
    });
    facts.append(strip);
  }
}

function block(part) {
  const node = element("div", `block ${part.kind}`), side = element("div", "side"), text = element("div", "text");
  side.append(element("strong", "", part.label));
  if (part.kind === "policy") {
    const paid = element("span", `ret ${signClass(part.reward)}`, signed(part.reward, 3));
    paid.title = "reward of this turn";
    side.append(paid);
  }
  if (part.tokens) side.append(element("div", "", part.kind === "policy" || part.tokens.length > 3 ? plural(part.tokens.length, "token") : ""));
  node.append(side, text);
  if (part.picture) { text.append(pictureOf(part.picture)); return node; }
  if (part.tokens) fillText(text, part); else fillPlain(text, part.text);
  const hasHit = text.querySelector("[data-hit]");
  if (part.kind === "prompt" && !hasHit && (part.text || text.textContent).split("\n").length > LONG_PROMPT_LINES) {
    node.classList.add("folded");
    const more = element("button", "more", "show all");
    more.type = "button";
    more.onclick = () => { more.textContent = node.classList.toggle("folded") ? "show all" : "show less"; };
    node.append(more);
  }
  return node;
}

function fillPlain(text, content) {
  const word = wanted(), lower = content.toLowerCase();
  let position = 0;
  while (word) {
    const hit = lower.indexOf(word, position);
    if (hit < 0) break;
    const mark = element("mark", "", content.slice(hit, hit + word.length));
    mark.dataset.hit = "";
    text.append(content.slice(position, hit), mark);
    position = hit + word.length;
  }
  text.append(content.slice(position));
}

// A segment holds plain text until it comes near the window; then each token gets an element of its own.
function fillText(text, part) {
  const hits = hitTokens(part);
  for (let start = 0; start < part.tokens.length; start += TOKENS_PER_SEGMENT) {
    const stop = Math.min(part.tokens.length, start + TOKENS_PER_SEGMENT), segment = element("span", "segment");
    let content = "";
    for (let i = start; i < stop; i++) content += vocabularyText[part.tokens[i]];
    segment.textContent = content;
    segment.source = part;
    segment.range = [start, stop];
    segment.hits = hits;
    if ([...hits].some((i) => i >= start && i < stop)) segment.dataset.hit = "";
    text.append(segment);
    watcher.observe(segment);
  }
}

function hitTokens(part) {
  const hits = new Set(), word = wanted();
  if (!word || part.kind === "prompt") return hits;
  const ends = [];
  let content = "";
  for (const place of part.tokens) { content += vocabularyText[place]; ends.push(content.length); }
  const lower = content.toLowerCase();
  for (let hit = lower.indexOf(word), token = 0; hit >= 0; hit = lower.indexOf(word, hit + word.length)) {
    while (token < ends.length && ends[token] <= hit) token++;
    for (let i = token; i < ends.length && (i === token || ends[i - 1] < hit + word.length); i++) hits.add(i);
  }
  return hits;
}

function fillSegment(segment) {
  if (segment.firstElementChild) return;
  watcher.unobserve(segment);
  const { source: part, range, hits } = segment, nodes = [];
  for (let i = range[0]; i < range[1]; i++) {
    let content = vocabularyText[part.tokens[i]];
    const isGlue = part.kind === "env" && i === 0 && content === "\n"; // the line break behind a turn's end needs no line
    if (isGlue) content = "↵";
    const token = element("span", isGlue || CONTROL.test(content) ? "t control" : "t", content);
    token.dataset.i = part.from < 0 ? -1 : part.from + i;
    token.dataset.v = part.tokens[i];
    if (/^\s+$/.test(content)) token.dataset.blank = content.replace(/\n/g, "↵").replace(/ /g, "·").replace(/\t/g, "→").replace(/\r/g, "␍");
    else if (content === "") token.dataset.blank = "◌";
    if (hits.has(i)) token.classList.add("hit");
    paint(token, part.from < 0 ? -1 : part.from + i);
    nodes.push(token);
  }
  segment.replaceChildren(...nodes);
}

// ---- Colours ----

function limitOf(key) { return index.limits[key] || 1; }

function colour(key, value) {
  if (key === "mask" || value === undefined || Number.isNaN(value)) return "";
  if (!Number.isFinite(value)) return "rgb(var(--bad))";
  const share = Math.min(1, Math.abs(value) / limitOf(key));
  if (share === 0) return "";
  const alpha = (0.06 + 0.62 * share).toFixed(3);
  return `rgb(var(--${key === "log_probs" ? "prob" : value > 0 ? "pos" : "neg"}) / ${alpha})`;
}

function paint(token, i) {
  if (i < 0 || !current.values) return;
  const isSampled = current.mask[i] === 1, reward = current.values.rewards[i];
  let background = "";
  if (mode === "mask") background = isSampled ? `rgb(var(--policy) / ${i % 2 ? 0.24 : 0.12})` : "";
  else if (current.values[mode]) background = colour(mode, current.values[mode][i]);
  token.style.backgroundColor = background;
  token.classList.toggle("paid", reward !== 0);
  if (reward !== 0) {
    token.dataset.paid = signed(reward, 3);
    token.classList.add(reward > 0 ? "gain" : "loss");
    if (!isSampled) token.classList.add("wrong");
  }
}

function setMode(key) {
  const button = document.querySelector(`#modes button[data-key="${key}"]`);
  if (!button) return;
  mode = key;
  document.querySelectorAll("#modes button").forEach((other) => other.setAttribute("aria-pressed", other === button));
  document.querySelectorAll("#transcript .t").forEach((token) => paint(token, Number(token.dataset.i)));
  drawLegend();
  remember();
}

function drawLegend() {
  const box = $("legend"), spec = MODES.find((m) => m.key === mode);
  box.replaceChildren();
  box.title = "";
  if (current && current.isText) { if (current.header.turns.length) box.append(element("span", "", "this dump holds texts only")); return; }
  if (mode === "mask") {
    const one = element("span", "swatch", "sampled"), zero = element("span", "swatch", "written");
    one.style.background = "linear-gradient(90deg, rgb(var(--policy) / .12) 50%, rgb(var(--policy) / .24) 50%)";
    zero.style.border = "1px solid var(--line)";
    box.append(one, element("span", "", "mask 1"), zero, element("span", "", "mask 0"));
    box.title = "Mask 1: sampled by the policy, trained on. Mask 0: written by the environment or the chat format.";
    return;
  }
  if (current && current.values && !current.values[mode]) { box.append(element("span", "", "not in this dump")); return; }
  const limit = limitOf(mode), ramp = element("span", "ramp"), digits = limit < 0.01 ? 5 : limit < 1 ? 3 : 2;
  const full = (name) => `rgb(var(--${name}) / .68)`;
  if (spec.kind === "low") {
    ramp.style.background = `linear-gradient(90deg, ${full("prob")}, transparent)`;
    box.append(element("span", "", `≤ ${signed(-limit, digits)}`), ramp, element("span", "", "0: certain"));
  } else {
    ramp.style.background = `linear-gradient(90deg, ${full("neg")}, transparent 50%, ${full("pos")})`;
    box.append(element("span", "", `≤ ${signed(-limit, digits)}`), ramp, element("span", "", `≥ ${signed(limit, digits)}`));
  }
  const bad = element("span", "swatch", "NaN");
  bad.style.background = "rgb(var(--bad))";
  box.append(bad);
}

// ---- One token ----

let cursor = -1;

function showTip(token) {
  const i = Number(token.dataset.i), place = Number(token.dataset.v), tip = $("tip"), table = element("table");
  const line = (name, text) => { const tr = element("tr"); tr.append(element("td", "", name), element("td", "", text)); table.append(tr); };
  const content = vocabularyText[place];
  tip.replaceChildren(element("span", "what", content === "" ? "part of a letter" : JSON.stringify(content).slice(1, -1)), table);
  if (vocabularyId[place] >= 0) line("id", String(vocabularyId[place]));
  if (i < 0) line("mask", "0, prompt");
  else {
    line("position", `${i} of ${current.response.length}`);
    line("mask", current.mask[i] ? "1, sampled" : "0, written");
    const precise = (v) => (Number.isFinite(v) ? signed(v, 5) : "NaN or infinite");
    for (const [name, label] of Object.entries(VALUE_LABELS)) {
      const value = current.values[name] && current.values[name][i];
      if (value === undefined || Number.isNaN(value) || (name === "rewards" && value === 0)) continue;
      line(label, precise(value));
      if (name === "log_probs") {
        const diff = current.values.log_prob_diffs;
        if (diff) line("log-prob, engine", precise(value - diff[i]));
        line("probability", value > -12 ? `${(100 * Math.exp(value)).toPrecision(3)}%` : "under 0.001%");
      }
    }
  }
  tip.hidden = false;
  const box = token.getBoundingClientRect(), size = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(8, Math.min(box.left, innerWidth - size.width - 8))}px`;
  tip.style.top = `${box.bottom + size.height + 10 < innerHeight ? box.bottom + 6 : Math.max(8, box.top - size.height - 6)}px`;
}

function hideTip() { $("tip").hidden = true; }

function moveCursor(by) {
  if (!current || current.isText) return;
  let next = cursor < 0 && by < 0 ? current.mask.length : cursor;
  do next += by; while (next >= 0 && next < current.mask.length && !current.mask[next]);
  if (next < 0 || next >= current.mask.length) return;
  document.querySelectorAll(".t.cursor").forEach((token) => token.classList.remove("cursor"));
  for (const segment of document.querySelectorAll("#transcript .segment")) {
    const { source: part, range } = segment;
    if (part.from < 0 || next < part.from + range[0] || next >= part.from + range[1]) continue;
    fillSegment(segment);
    const token = segment.children[next - part.from - range[0]];
    token.classList.add("cursor");
    token.scrollIntoView({ block: "nearest" });
    showTip(token);
    cursor = next;
  }
}

let turnAt = -1;

function goToTurn(number) {
  const blocks = [...document.querySelectorAll("#transcript .block.policy")];
  if (!blocks.length) return;
  turnAt = Math.max(0, Math.min(blocks.length - 1, number));
  blocks.forEach((node, i) => node.classList.toggle("here", i === turnAt));
  blocks[turnAt].scrollIntoView({ block: "start" });
  $("page").scrollTop -= 12;
}

// ---- Where we are, in the address; keys; start ----

function remember() {
  if (selected >= 0) history.replaceState(null, "", `#episode=${selected}&colour=${mode}`);
}

function recall() {
  const place = new URLSearchParams(location.hash.slice(1));
  const id = Number(place.get("episode"));
  return { id: place.has("episode") && id >= 0 && id < columns.env.length ? id : -1, mode: place.get("colour") };
}

function setTheme(theme) { document.documentElement.dataset.theme = theme; }

function keyPressed(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  const isTyping = /^(INPUT|SELECT|TEXTAREA)$/.test(document.activeElement.tagName) && document.activeElement.type !== "checkbox";
  if (event.key === "Escape") { document.activeElement.blur(); hideTip(); return; }
  if (isTyping) {
    if (event.key === "Enter" && document.activeElement === $("search")) nextHit();
    return;
  }
  const actions = {
    j: () => move(1), ArrowDown: () => move(1), k: () => move(-1), ArrowUp: () => move(-1),
    g: () => move(-Infinity), G: () => move(Infinity), n: () => goToTurn(turnAt + 1), p: () => goToTurn(turnAt - 1),
    ArrowRight: () => moveCursor(1), ArrowLeft: () => moveCursor(-1), "/": () => $("search").focus(),
    b: () => $("blanks").click(), t: () => $("theme").click(), "?": () => $("help").showModal(),
  };
  const number = Number(event.key);
  if (number >= 1 && number <= MODES.length) setMode(MODES[number - 1].key);
  else if (actions[event.key]) actions[event.key]();
  else return;
  event.preventDefault();
}

let hitAt = 0;

function nextHit() {
  const segments = [...document.querySelectorAll("#transcript [data-hit]")];
  for (const segment of segments) if (segment.source) fillSegment(segment);
  const hits = [...document.querySelectorAll("#transcript .t.hit, #transcript mark")];
  if (hits.length) hits[++hitAt % hits.length].scrollIntoView({ block: "center" });
}

async function start() {
  index = JSON.parse(new TextDecoder().decode(await unpack($("index").textContent)));
  columns = index.columns;
  chunkTexts = [...document.querySelectorAll("script.chunk")];
  vocabularyText = index.vocabulary.map((entry) => entry.slice(entry.indexOf(" ") + 1));
  vocabularyId = index.vocabulary.map((entry) => parseInt(entry, 10));
  $("title").textContent = document.title = index.title;
  $("f-env").append(new Option("all", ""), ...index.env.map((name, code) => new Option(name, code)));
  MODES.forEach((spec, i) => {
    const button = element("button", "", spec.label);
    button.type = "button";
    button.dataset.key = spec.key;
    button.title = `Colour tokens by ${spec.label.toLowerCase()} (${i + 1})`;
    button.onclick = () => setMode(spec.key);
    $("modes").append(button);
  });
  setTheme(matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light");
  $("theme").onclick = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");
  $("help-button").onclick = () => $("help").showModal();
  $("blanks").onchange = () => document.body.classList.toggle("blanks", $("blanks").checked);
  $("clear").onclick = () => {
    for (const id of ["search", "f-env", "f-success", "f-step-from", "f-step-to", "f-ret-from", "f-ret-to"]) $(id).value = "";
    chosenReasons.clear();
    search();
  };
  for (const id of ["f-env", "f-success", "f-step-from", "f-step-to", "f-ret-from", "f-ret-to", "sort"]) $(id).addEventListener("input", applyFilters);
  let typing;
  $("search").addEventListener("input", () => { clearTimeout(typing); typing = setTimeout(search, 180); });
  $("list").addEventListener("scroll", drawRows, { passive: true });
  addEventListener("resize", drawRows);
  addEventListener("keydown", keyPressed);
  addEventListener("hashchange", () => { const { id, mode: key } = recall(); if (key && key !== mode) setMode(key); if (id >= 0 && id !== selected) { scrollToRow(shown.indexOf(id)); select(id); } });
  $("transcript").addEventListener("mouseover", (event) => { const token = event.target.closest(".t"); token ? showTip(token) : hideTip(); });
  $("transcript").addEventListener("mouseleave", hideTip);
  $("page").addEventListener("scroll", hideTip, { passive: true });
  const place = recall();
  setMode(MODES.some((spec) => spec.key === place.mode) ? place.mode : "mask");
  selected = Math.max(0, place.id);
  applyFilters();
  await select(selected);
  document.body.dataset.ready = "";
}

start();
