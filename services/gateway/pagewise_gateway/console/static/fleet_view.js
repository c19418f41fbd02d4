// The fleet: scheduler, gateways and executors, how fast they are, and how well their times are predicted.

import { bytes, count, micros, num, percent, seconds, short } from "./format.js";
import { Bar, Empty, Fact, hitsOf, Spark, State, statesOf, Table } from "./parts.js";
import { href } from "./route.js";
import { html } from "./htm-preact.js";

export function FleetView({ store }) {
  const { fleet } = store;
  if (!fleet) return html`<div class="panel"><${Empty}>Waiting for the first update.<//></div>`;
  const gone = [...store.gone.keys()];
  return html`
    <${Scheduler} scheduler=${fleet.scheduler} store=${store} model=${fleet.model} />
    <section aria-label="Executors">
      <h2 class="section">Executors</h2>
      <div class="cards">
        ${fleet.executors.map(
          (each) => html`<${Executor} key=${each.executor_id} executor=${each} tokens=${store.samples.get(each.executor_id).map((sample) => sample.tokens)} />`,
        )}
        ${gone.map((name) => html`<${Gone} key=${name} name=${name} />`)}
        ${!fleet.executors.length && !gone.length && html`<div class="panel"><${Empty}>No executor has joined.<//></div>`}
      </div>
    </section>
    <${Links} executors=${fleet.executors} />
    ${fleet.keys?.length > 0 && html`<${Keys} keys=${fleet.keys} />`}
    <section class="panel">
      <h2>Gateways</h2>
      <${Table} label="Gateways" head=${["Gateway", "State", "Requests"]}>
        ${fleet.gateways.map(
          (each) => html`<tr key=${each.gateway_id}>
            <th scope="row">${short(each.gateway_id, 24)}</th>
            <td><${State} value=${each.state} />${each.reason && html` <small>${each.reason}</small>`}</td>
            <td>${num(each.requests)}${each.reason && " ended"}</td>
          </tr>`,
        )}
      <//>
    </section>
  `;
}

function Scheduler({ scheduler, store, model }) {
  const tiers = hitsOf(scheduler);
  return html`<section class="panel" aria-label="Scheduler">
    <h2>Scheduler <small>${model}</small></h2>
    <dl class="numbers">
      <${Fact} name="Up for" value=${seconds(scheduler.uptime_seconds)}><small>version ${scheduler.version}</small><//>
      <${Fact} name="Tokens per second" value=${num(scheduler.tokens_per_second)}><${Spark} values=${store.tokens} /><//>
      <${Fact} name="Prompt tokens per second" value=${num(scheduler.prompt_tokens_per_second)} />
      <${Fact} name="Requests" value=${num(scheduler.requests_running)}>
        <small>running, ${num(scheduler.requests_waiting)} waiting${scheduler.unplaced ? `, ${num(scheduler.unplaced)} of them not placed` : ""}</small>
      <//>
      <${Fact} name="Prompt tokens from cache" value=${percent(tiers.reduce((sum, { value }) => sum + value, 0))}>
        <${Bar} label="Found in" total=${1} parts=${tiers} />
        <small>${shares(tiers) || "last minute"}</small>
      <//>
    </dl>
  </section>`;
}

const shares = (tiers) => tiers.filter(({ value }) => value > 0).map(({ label, value }) => `${label} ${percent(value)}`).join(", ");

function Executor({ executor, tokens }) {
  const { executor_id: name, state, role, running, waiting, counts = {}, device, tiers = {}, preemptions } = executor;
  const blocks = device.num_blocks;
  return html`<article class="panel card" aria-label=${name}>
    <h3><a href=${href("memory", { executor: name })}>${name}</a> <${State} value=${state} />${role && role !== "both" ? html` <small>${role}</small>` : ""}</h3>
    <p class="big">${num(executor.tokens_per_second)} <small>tokens/s</small></p>
    <${Spark} values=${tokens} />
    <${Bar} label="Device blocks" total=${blocks} parts=${statesOf(counts)} />
    <dl class="facts">
      <dt>Requests</dt>
      <dd>${num(running)} running, ${num(waiting)} waiting</dd>
      <dt>Device</dt>
      <dd>${num(blocks - (counts.free ?? 0) - (counts.cached ?? 0))} in use, ${num(counts.cached)} cached, ${num(counts.free)} free</dd>
      ${Object.entries(tiers).map(([tier, pool]) => html`<dt>${tier[0].toUpperCase() + tier.slice(1)}</dt><dd>${num(pool.used)} of ${count(pool.num_blocks, "block")}</dd>`)}
      <dt>Prompt tokens from cache</dt>
      <dd>${shares(hitsOf(executor)) || "none in the last minute"}</dd>
      <dt>Sharing saves</dt>
      <dd>${count(executor.saved_blocks ?? 0, "block")}</dd>
      <dt>Preemptions</dt>
      <dd>${num(preemptions)}</dd>
      <dt>Prediction error</dt>
      <dd>${percent(executor.costs.prefill_error)}</dd>
    </dl>
  </article>`;
}

function Gone({ name }) {
  return html`<article class="panel card gone" aria-label=${`${name} is gone`}>
    <h3>${name} <${State} value="gone" /></h3>
    <p>Its requests go on elsewhere. If it comes back under this name, it joins by itself.</p>
  </article>`;
}

function Keys({ keys }) {
  const rows = keys.flatMap(({ name, memory, spared_by_next_gib: spared }) => {
    const tiers = Object.entries(memory);
    return (tiers.length ? tiers : [["", {}]]).map(([tier, use], index) => ({ name, tier, ...use, spared: index ? null : spared / 60 }));
  });
  return html`<section class="panel">
    <h2>API keys <small>their budgets of memory, and what it lacks</small></h2>
    <${Table} label="API keys" head=${["Key", "Tier", "Cached KV", "Min", "Low", "High", "Next GiB would save"]}>
      ${rows.map(
        (row) => html`<tr key=${`${row.name}/${row.tier}`}>
          <th scope="row">${short(row.name, 24)}</th>
          <td>${row.tier || "–"}</td>
          <td>${bytes(row.used)}</td>
          <td>${bytes(row.min)}</td>
          <td>${bytes(row.low)}</td>
          <td>${bytes(row.high)}</td>
          <td>${row.spared === null ? "" : `${num(row.spared)} tokens/s`}</td>
        </tr>`,
      )}
    <//>
  </section>`;
}

function Links({ executors }) {
  const links = executors.flatMap(({ executor_id: to, costs }) =>
    Object.entries({ ...costs.tiers, ...costs.peers }).map(([from, link]) => ({ ...link, from, to })),
  );
  return html`<section class="panel">
    <h2>Links <small>measured costs of copies</small></h2>
    ${links.length
      ? html`<${Table} label="Links" head=${["From", "To the device of", "Setup", "Per block", "Prediction error", "Loading now"]}>
          ${links.map(
            (link) => html`<tr key=${`${link.from}/${link.to}`}>
              <th scope="row">${link.from}</th>
              <td>${link.to}</td>
              <td>${micros(link.setup)}</td>
              <td>${micros(link.block)}</td>
              <td>${percent(link.error)}</td>
              <td>${num(link.loading)}</td>
            </tr>`,
          )}
        <//>`
      : html`<${Empty}>Executors have neither a tier below the device nor others to fetch from.<//>`}
  </section>`;
}
