// Sources of the run's data: embedded in a report, or requested from the server of the live page.

async function openSource() {
  const embedded = document.getElementById("data").textContent.trim();
  const source = embedded ? new ReportSource(embedded) : new LiveSource();
  await source.open();
  return source;
}

class ReportSource {
  constructor(encoded) {
    this.encoded = encoded;
    this.live = false;
  }

  async open() {
    const packed = Uint8Array.from(atob(this.encoded), (char) => char.charCodeAt(0));
    this.encoded = "";
    const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
    const buffer = await new Response(stream).arrayBuffer();
    const length = new DataView(buffer).getUint32(0, true);
    this.data = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, length)));
    this.vocab = this.data.vocab;
    const { rows, details, facts, layout } = this.data.rollouts;
    this.rows = rows;
    this.details = details;
    this.facts = { ...factsOf(rows), envs: facts.envs, kinds: Object.fromEntries(Object.keys(facts.kinds).map((kind) => [kind, factsOf(rows.filter((row) => row.kind === kind))])) };
    this.total = facts.count;
    this.totals = facts.kinds; // of the run; the report may contain fewer
    this.columns = readColumns(buffer, 4 + length, layout);
    this.byId = new Map(rows.map((row, position) => [row.id, position]));
    this.searchedTexts = details.map((d) => [d.prompt, d.completion, d.error].map(plainText).join("\n").toLowerCase());
    let start = 0;
    this.starts = details.map((d) => (start += d.length) - d.length);
  }

  async select(query, offset, limit) {
    const text = query.text.toLowerCase();
    const matches = (row, position) =>
      (query.kind === null || row.kind === query.kind) &&
      (query.step === null || row.step === query.step) &&
      (query.env === null || row.env === query.env) &&
      (query.status === null || row.status === query.status) &&
      (query.min === null || (row.reward ?? NaN) >= query.min) &&
      (query.max === null || (row.reward ?? NaN) <= query.max) &&
      (query.group === null || row.group === query.group) &&
      (query.index === null || row.index === query.index) &&
      (query.equal === null || this.equalGroups().has(groupKey(row)) === query.equal) &&
      (!text || this.searchedTexts[position].includes(text));
    const found = this.rows.filter(matches);
    const sign = query.descending ? -1 : 1;
    const last = (value) => value ?? Infinity * sign;
    found.sort((a, b) => sign * (last(a[query.sort]) - last(b[query.sort])) || a.id - b.id);
    return { total: found.length, rows: found.slice(offset, offset + limit) };
  }

  // Keys of the groups in which every rollout has the same reward.
  equalGroups() {
    if (this.equal) return this.equal;
    const rewards = groupBy(this.rows, groupKey);
    return (this.equal = new Set([...rewards].filter(([, rows]) => rows.length > 1 && new Set(rows.map((row) => row.reward)).size === 1).map(([key]) => key)));
  }

  // Prompts answered at several steps, those whose mean reward rose most first.
  async prompts() {
    const byPrompt = groupBy(this.rows, (row) => this.promptKey(row));
    const mean = (rows) => rows.reduce((sum, row) => sum + (row.reward ?? 0), 0) / rows.length;
    const found = [...byPrompt.values()].map((rows) => {
      const steps = [...new Set(rows.map((row) => row.step))].sort((a, b) => a - b), at = (step) => mean(rows.filter((row) => row.step === step));
      return { ...rows[0], steps: steps.length, first: at(steps[0]), last: at(steps.at(-1)) };
    });
    return found.filter((entry) => entry.steps > 1).sort((a, b) => a.first - a.last - (b.first - b.last)).slice(0, 200);
  }

  async history(row) {
    const key = this.promptKey(row);
    return this.rows.filter((other) => this.promptKey(other) === key).sort((a, b) => a.step - b.step || a.id - b.id);
  }

  promptKey(row) {
    return JSON.stringify([row.kind, row.env, this.details[this.byId.get(row.id)].prompt]);
  }

  async logs() {
    return this.data.logs;
  }

  async group(row) {
    return row.group === null ? [row] : this.rows.filter((other) => other.source === row.source && other.step === row.step && other.group === row.group);
  }

  async detail(id) {
    const position = this.byId.get(id);
    const detail = { ...this.details[position], tokens: [], mask: [], streams: {} };
    const start = this.starts[position], end = start + detail.length;
    for (const [name, values] of Object.entries(this.columns)) {
      const part = Array.from(values.subarray(start, end));
      if (name === "tokens" || name === "mask") detail[name] = part;
      else detail.streams[name] = part.map(SCALES[name] || SCALES.difference);
    }
    return detail;
  }
}

function groupKey(row) {
  return `${row.source} ${row.step} ${row.group}`;
}

function groupBy(items, keyOf) {
  const groups = new Map();
  for (const item of items) {
    const key = keyOf(item);
    if (groups.has(key)) groups.get(key).push(item);
    else groups.set(key, [item]);
  }
  return groups;
}

function factsOf(rows) {
  const names = (key) => [...new Set(rows.map((row) => row[key] ?? "none"))];
  return { count: rows.length, envs: names("env"), statuses: names("status"), steps: names("step").sort((a, b) => a - b) };
}

// Decoders of the streams of a report.
const SCALES = {
  logprob: (q) => -((q / 64) ** 2),
  version: (q) => q,
  difference: (q) => Math.sign(q) * (q / 32) ** 2,
};

function readColumns(buffer, start, layout) {
  const kinds = { u4: Uint32Array, u2: Uint16Array, u1: Uint8Array, i1: Int8Array };
  const columns = {};
  for (const [name, kind, length] of layout) {
    const size = length * kinds[kind].BYTES_PER_ELEMENT;
    columns[name] = new kinds[kind](buffer.slice(start, start + size));
    start += Math.ceil(size / 4) * 4;
  }
  return columns;
}

const SILENCE_MS = 12000; // three signs of life missed

class LiveSource {
  constructor() {
    this.live = true;
    this.vocab = {};
  }

  async open() {
    this.data = await this.fetchJson("api/run");
    this.facts = this.data.facts;
    this.updated = Date.now();
    this.lag = Date.now() - this.data.run.written * 1000; // of the clocks
  }

  async fetchJson(path) {
    const response = await fetch(path);
    if (!response.ok) throw new Error(`${path}: ${response.status} ${await response.text()}`);
    return response.json();
  }

  async select(query, offset, limit) {
    const parameters = new URLSearchParams({ offset, limit });
    for (const [name, value] of Object.entries(query)) if (value !== null && value !== "") parameters.set(name, value);
    return this.fetchJson(`api/rollouts?${parameters}`);
  }

  async group(row) {
    return this.fetchJson(`api/rollouts/${row.id}/group`);
  }

  async prompts() {
    return this.fetchJson("api/prompts");
  }

  async history(row) {
    return this.fetchJson(`api/rollouts/${row.id}/history`);
  }

  async logs() {
    return this.fetchJson("api/logs");
  }

  async detail(id) {
    const { detail, vocab } = await this.fetchJson(`api/rollouts/${id}`);
    Object.assign(this.vocab, vocab);
    return detail;
  }

  // Calls `onChange` after each change event of the server, `onState` when the connection is lost or restored. The
  // server sends a sign of life every few seconds: a connection can also be lost without an error.
  listen(onChange, onState) {
    const events = new EventSource("api/events");
    let lost = false, heard = Date.now();
    const markLost = () => { if (!lost) onState("lost"); lost = true; };
    let isRefreshing = false, isOutdated = false; // one request at a time: each continues where the last one ended
    let isReloading = false; // a second reload would abort the first
    const refresh = async () => {
      heard = Date.now();
      isOutdated = isRefreshing;
      if (isRefreshing) return;
      isRefreshing = true;
      try {
        const { run, is_replaced, ...update } = await this.fetchJson(`api/update?offset=${this.data.offset}&first=${this.data.first}`);
        // A new attempt of a process repeats steps.
        const isResumed = Object.entries(update.attempts ?? {}).some(([process, attempt]) => attempt > (this.data.attempts[process] ?? 0));
        isReloading = is_replaced || isResumed; // also for a new run in the same directory
        if (isReloading) return location.reload();
        mergeRun(this.data, update);
        Object.assign(this.data.run, run);
        this.facts = update.facts;
        this.updated = Date.now();
        markLive();
        onChange();
      } catch { markLost(); } finally { isRefreshing = isReloading; }
      if (isOutdated) refresh();
    };
    const markLive = () => { if (lost) onState("live"); lost = false; };
    const hear = () => {
      heard = this.updated = Date.now();
      if (lost) refresh(); // changes in between sent no event
    };
    events.addEventListener("open", () => { onState("live"); hear(); });
    events.addEventListener("alive", hear);
    events.addEventListener("error", markLost);
    events.addEventListener("change", refresh);
    setInterval(() => { if (Date.now() - heard > SILENCE_MS) markLost(); }, 1000);
  }
}

function mergeRun(data, update) {
  data.offset = update.offset;
  data.first = update.first;
  const joined = [], places = new Map(); // curves with the same steps share them
  const place = (old, fresh) => {
    const key = `${old} ${fresh}`;
    if (!places.has(key)) places.set(key, joined.push([...(data.series.steps[old] || []), ...(update.series.steps[fresh] || [])]) - 1);
    return places.get(key);
  };
  for (const process of new Set([data, update].flatMap(({ series }) => Object.keys(series.curves)))) {
    const curves = (data.series.curves[process] ||= {}), added = update.series.curves[process] || {};
    for (const name of Object.keys({ ...curves, ...added })) {
      const [old, values] = curves[name] || [-1, []], [fresh, more] = added[name] || [-1, []];
      curves[name] = [place(old, fresh), [...values, ...more]];
    }
  }
  data.series.steps = joined;
  for (const [process, spans] of Object.entries(update.lanes.lanes)) {
    const lane = (data.lanes.lanes[process] ||= []);
    for (const [activity, ...rest] of spans) {
      const name = update.lanes.names[activity];
      if (!data.lanes.names.includes(name)) data.lanes.names.push(name);
      lane.push([data.lanes.names.indexOf(name), ...rest]);
    }
  }
  for (const part of ["findings", "checks", "alerts", "configs", "shares", "trends", "scores", "contexts", "evals", "tenants", "weights", "checkpoints", "facts"]) if (update[part]) data[part] = update[part];
}

// One metric of a process, or of the first process that has it.
function curve(data, name, process) {
  const order = ["trainer", "sft", "orchestrator", "inference"];
  const known = Object.keys(data.series.curves).sort((a, b) => (order.indexOf(a) + 9) % 9 - (order.indexOf(b) + 9) % 9);
  const owner = process || known.find((candidate) => data.series.curves[candidate][name]);
  const found = owner && data.series.curves[owner]?.[name];
  return found ? { name, process: owner, steps: data.series.steps[found[0]], values: found[1] } : null;
}

function allCurves(data) {
  return Object.entries(data.series.curves).flatMap(([process, metrics]) =>
    Object.keys(metrics).map((name) => curve(data, name, process)));
}

function plainText(value) {
  if (Array.isArray(value)) return value.map((part) => plainText(part?.content ?? part?.text)).join("\n");
  return value === null || value === undefined ? "" : String(value);
}
