// What the page knows: the newest of each event, and short histories of it. Nothing here grows with time.

const POINTS = 120; // of a line of throughput: a minute at two updates a second
const MINUTE = 60;

export class Store {
  connection = { state: "connecting", message: "" };
  fleet = null;
  requests = null;
  prefixes = null;
  maps = new Map(); // "executor/tier" -> map
  tokens = []; // of the last minute, per second
  running = [];
  samples = new Map(); // executor -> what it had counted, at each update of the last minute
  gone = new Map(); // executor -> {at, running, moved: Set of requests, to: Set of executors}
  restarted = 0; // when the scheduler was last seen to have started anew
  problems = {}; // part -> why it cannot be shown now
  #placed = new Map(); // request -> executor
  #seen = new Map(); // executor -> {state, running}

  /** Take an event of the stream. */
  take(name, data) {
    if (name === "problem") this.problems[data.part] = data.message;
    else delete this.problems[name];
    if (name === "fleet") this.#takeFleet(data);
    else if (name === "requests") this.#takeRequests(data);
    else if (name === "prefixes") this.prefixes = data;
    else if (name === "map") this.#takeMap(data);
  }

  /** Forget maps, and why there were none: those of the next stream are others. */
  clearMaps() {
    this.maps.clear();
    this.problems = {};
  }

  /** The server's clock in seconds, 0 before the first update. */
  get now() {
    return this.fleet?.time ?? 0;
  }

  /** How much a counter has risen in the last minute, of one executor or of all. */
  lastMinute(counter, executor) {
    return this.perSecond(counter, executor).reduce((sum, each) => sum + each, 0);
  }

  /** How much a counter has risen in each second of the last minute, oldest first. */
  perSecond(counter, executor) {
    const sums = new Array(MINUTE).fill(0);
    for (const [name, samples] of this.samples) {
      if (executor && name !== executor) continue;
      for (let index = 1; index < samples.length; index += 1) {
        const age = Math.floor(this.now - samples[index].time);
        // An executor that joins again starts its counters at 0.
        if (age < MINUTE) sums[MINUTE - 1 - age] += Math.max(0, samples[index][counter] - samples[index - 1][counter]);
      }
    }
    return sums;
  }

  #takeFleet(fleet) {
    const before = this.fleet;
    this.fleet = fleet;
    if (before && fleet.scheduler.uptime_seconds < before.scheduler.uptime_seconds - 1) this.restarted = fleet.time;
    this.tokens = [...this.tokens, fleet.scheduler.tokens_per_second].slice(-POINTS);
    this.running = [...this.running, fleet.scheduler.requests_running].slice(-POINTS);
    const present = new Set();
    for (const { executor_id: name, counters, preemptions, tokens_per_second: tokens } of fleet.executors) {
      present.add(name);
      const sample = { ...counters, preemptions, tokens, time: fleet.time };
      const known = this.samples.get(name) ?? [];
      this.samples.set(name, [...known.filter(({ time }) => fleet.time - time <= MINUTE), sample]);
    }
    this.#noticeGone(present, fleet.time);
    for (const executor of fleet.executors) {
      const { state, running } = executor;
      this.#seen.set(executor.executor_id, { state, running });
    }
  }

  #takeMap(data) {
    const name = `${data.executor_id}/${data.tier}`;
    const before = this.maps.get(name);
    // The same picture again is not drawn again.
    const same = (field) => before[field] === data[field];
    const fields = ["encoded", "first", "count", "num_blocks", "blocks_per_cell", "colour"];
    data.encoded = data.cells;
    data.labels = JSON.stringify(data.legend);
    if (before && [...fields, "labels"].every(same)) return;
    this.maps.set(name, decode(data));
  }

  #noticeGone(present, time) {
    for (const [name, last] of this.#seen) {
      if (present.has(name)) continue;
      this.gone.set(name, { at: time, running: last.running, state: last.state, moved: new Set(), to: new Set() });
      this.#seen.delete(name);
      for (const key of this.maps.keys()) if (key.startsWith(`${name}/`)) this.maps.delete(key);
    }
    for (const [name, { at }] of this.gone) {
      if (present.has(name) || time - at > MINUTE) this.gone.delete(name);
    }
    for (const name of this.samples.keys()) if (!present.has(name) && !this.gone.has(name)) this.samples.delete(name);
  }

  #takeRequests(requests) {
    this.requests = requests;
    const placed = new Map();
    for (const each of requests.running) {
      const before = this.#placed.get(each.request_id);
      // While it waits for its next executor, it is still counted as coming from the last one.
      const executor = each.executor_id || before;
      if (executor) placed.set(each.request_id, executor);
      const gone = before && before !== executor ? this.gone.get(before) : undefined;
      if (gone) {
        gone.moved.add(each.request_id);
        gone.to.add(executor);
      }
    }
    for (const each of requests.waiting) {
      const before = this.#placed.get(each.request_id);
      if (before) placed.set(each.request_id, before);
    }
    this.#placed = placed;
  }
}

/** Words for labels of a legend, by colour; a prefix and an age are numbers, and states of blocks stay as they are. */
const WORDS = {
  prefix: (label) => label.replace(/^\d+$/, "prefix of block $&"),
  age: (label) => label.replace(/^\d+$/, (blocks) => (blocks === "0" ? "used last" : `unused for ${blocks} or less`)),
  tier: (label) => label.replaceAll(",", " and "),
};

function decode(map) {
  const text = atob(map.cells);
  const cells = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index += 1) cells[index] = text.charCodeAt(index);
  const words = WORDS[map.colour] ?? ((label) => label);
  const legend = map.legend.map(([index, label]) => [index, words(label)]);
  return { ...map, legend, cells };
}
