// The maps as a table, for those who do not see them.

import { num, percent } from "./format.js";
import { statesOf, Table } from "./parts.js";
import { html } from "./htm-preact.js";

const AREAS = 8;

export function MapSummary({ maps, executors }) {
  return html`<details class="panel summary">
    <summary>The maps as a table</summary>
    <h3>Executors</h3>
    <${Table} label="Blocks of each executor by state" head=${["Executor", "Blocks", ...statesOf().map(({ label }) => label), "Lower tiers"]}>
      ${executors.map(
        ({ executor_id: name, device, counts, tiers = {} }) =>
          html`<tr key=${name}>
            <th scope="row">${name}</th>
            <td>${num(device.num_blocks)}</td>
            ${statesOf(counts).map(({ label, value }) => html`<td key=${label}>${num(value)}</td>`)}
            <td>${Object.entries(tiers).map(([tier, pool]) => `${tier}: ${num(pool.used)} of ${num(pool.num_blocks)} used`).join("; ") || "none"}</td>
          </tr>`,
      )}
    <//>
    <h3>Areas of what is shown</h3>
    <${Table} label="What most blocks of each area are" head=${["Executor", "Tier", "Blocks", "Most of them are", "Share"]}>
      ${maps.flatMap((map) => areas(map).map((area) => html`<tr key=${`${map.executor_id}/${map.tier}/${area.first}`}>
        <th scope="row">${map.executor_id}</th>
        <td>${map.tier}</td>
        <td>${num(area.first)}–${num(area.last)}</td>
        <td>${area.label}</td>
        <td>${percent(area.share)}</td>
      </tr>`))}
    <//>
  </details>`;
}

function areas(map) {
  const cells = map.cells.length / 2;
  const size = Math.max(1, Math.ceil(cells / AREAS));
  const labels = new Map(map.legend);
  const found = [];
  for (let begin = 0; begin < cells; begin += size) {
    const end = Math.min(begin + size, cells);
    const sums = new Map();
    for (let cell = begin; cell < end; cell += 1) {
      const label = labels.get(map.cells[2 * cell]) ?? "unknown";
      sums.set(label, (sums.get(label) ?? 0) + map.cells[2 * cell + 1] / 255);
    }
    const [label, sum] = [...sums].sort((a, b) => b[1] - a[1])[0];
    const first = map.first + begin * map.blocks_per_cell;
    const last = Math.min(map.first + end * map.blocks_per_cell, map.num_blocks) - 1;
    found.push({ first, last, label, share: sum / (end - begin) });
  }
  return found;
}
