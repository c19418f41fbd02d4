// Small parts that all views use.

import { html } from "./htm-preact.js";

/** A line of numbers, for the eye only: the newest of them stands beside it as text. */
export function Spark({ values }) {
  const most = Math.max(...values, 1e-9);
  const step = 100 / Math.max(values.length - 1, 1);
  const points = values.map((value, index) => `${(index * step).toFixed(1)},${(23 - (value / most) * 21).toFixed(1)}`);
  const line = points.length > 1 ? points.join(" ") : "0,23 100,23";
  return html`<svg class="spark" viewBox="0 0 100 24" preserveAspectRatio="none" aria-hidden="true">
    <polygon points=${`0,24 ${line} 100,24`} />
    <polyline points=${line} />
  </svg>`;
}

/** A bar of several parts: [{label, value, className}]. The text alternative lists them. */
export function Bar({ parts, total, label }) {
  const whole = total || parts.reduce((sum, { value }) => sum + value, 0) || 1;
  const text = parts.map(({ label: name, value }) => `${name} ${Math.round((100 * value) / whole)}%`).join(", ");
  return html`<div class="bar" role="img" aria-label=${`${label}: ${text}`}>
    ${parts
      .filter(({ value }) => value > 0)
      .map(
        (part) =>
          html`<span
            key=${part.label}
            class=${part.className}
            style=${{ width: `${(100 * part.value) / whole}%` }}
            title=${`${part.label}: ${part.value}`}
          ></span>`,
      )}
  </div>`;
}

const TIERS = ["device", "host", "peer", "disk", "redis"];

/** Parts of a bar: the share of prompt tokens of the last minute that was found in each tier. */
export function hitsOf({ hit_rate: rates = {} }) {
  return TIERS.map((tier) => ({ label: tier, value: rates[tier] ?? 0, className: tier }));
}

const STATES = ["in use", "lent", "copying", "cached", "free"];

/** Parts of a bar: blocks by state. */
export function statesOf(counts = {}) {
  return STATES.map((label) => ({ label, value: counts[label.replace(" ", "_")] ?? 0, className: label.replace(" ", "-") }));
}

/** A number with its name. */
export function Fact({ name, value, hint, children }) {
  return html`<div class="fact" title=${hint}>
    <dt>${name}</dt>
    <dd>${value}${children}</dd>
  </div>`;
}

/** A state as a coloured word. */
export function State({ value }) {
  return html`<span class="state ${String(value).replaceAll(" ", "-")}">${value || "unknown"}</span>`;
}

/** What is said where nothing can be shown. */
export function Empty({ children }) {
  return html`<p class="empty">${children}</p>`;
}

/** A table that scrolls sideways where it does not fit. */
export function Table({ label, head, children }) {
  return html`<div class="scroll" role="region" aria-label=${label} tabindex="0">
    <table>
      <thead>
        <tr>
          ${head.map((title) => html`<th scope="col" key=${title}>${title}</th>`)}
        </tr>
      </thead>
      <tbody>
        ${children}
      </tbody>
    </table>
  </div>`;
}
