// The page: its frame, the stream, and which view is shown.

import { apiKey, setApiKey } from "./api.js";
import { captions } from "./captions.js";
import { FleetView } from "./fleet_view.js";
import { num } from "./format.js";
import { MemoryView, memoryQuery } from "./memory_view.js";
import { PrefixView } from "./prefix_view.js";
import { RequestsView } from "./requests_view.js";
import { href, readRoute, VIEWS } from "./route.js";
import { Store } from "./store.js";
import { Stream } from "./stream.js";
import { TryView } from "./try_view.js";
import { html, render, useState } from "./htm-preact.js";

const SHOWN = { memory: MemoryView, prefixes: PrefixView, requests: RequestsView, fleet: FleetView, try: TryView };

const PARTS = { prefixes: "fleet,prefixes", requests: "fleet,requests", fleet: "fleet,requests", try: "fleet" };

const STATES = {
  connecting: "connecting",
  live: "live",
  disconnected: "disconnected",
  key: "needs an API key",
  paused: "paused",
};

const store = new Store();
let route = readRoute();
let asked = 0;
let settle = 0;

const stream = new Stream(
  (name, data) => {
    store.take(name, data);
    draw();
  },
  (state, message) => {
    store.connection = { state, message };
    draw();
  },
);

/** Draw once, whatever has changed before the next picture. */
function draw() {
  if (asked) return;
  asked = requestAnimationFrame(() => {
    asked = 0;
    render(html`<${App} />`, root);
  });
}

function openStream() {
  clearTimeout(settle);
  const memory = route.view === "memory";
  const query = memory ? memoryQuery(route.params) : `parts=${PARTS[route.view]}`;
  // Zooming changes the query many times a second.
  settle = setTimeout(() => stream.open(query.toString()), memory ? 150 : 0);
}

addEventListener("hashchange", () => {
  const before = route.view;
  route = readRoute();
  openStream();
  draw();
  if (before !== route.view) document.getElementById("main")?.focus({ preventScroll: true });
});
addEventListener("resize", draw);
addEventListener("themechange", draw);

function App() {
  const View = SHOWN[route.view];
  const { state } = store.connection;
  const [, title] = VIEWS.find(([name]) => name === route.view);
  document.title = `${title} · Pagewise console`;
  return html`
    <${Header} />
    <main id="main" tabindex="-1" class=${state === "disconnected" ? "stale" : ""}>
      <h1 class="hidden">${title}</h1>
      ${state === "key" ? html`<${KeyForm} />` : html`<${Disconnected} /><${View} store=${store} params=${route.params} />`}
    </main>
    <${Announcements} />
  `;
}

function Header() {
  const { state } = store.connection;
  const fleet = store.fleet;
  return html`<header>
    <a class="brand" href=${href("memory")}>
      <img src="/console/assets/icon.svg" alt="" width="28" height="28" />
      <span>Pagewise</span>
      ${fleet && html`<span class="model" title="The model that is served">${fleet.model}</span>`}
    </a>
    <nav aria-label="Views">
      ${VIEWS.map(
        ([name, title]) =>
          html`<a key=${name} href=${href(name)} aria-current=${route.view === name ? "page" : undefined}>${title}</a>`,
      )}
    </nav>
    <div class="tools">
      ${fleet?.consoles > 1 && html`<span class="watchers" title="Consoles that are open">${num(fleet.consoles)} watch</span>`}
      <span class="connection ${state}" role="status"><i aria-hidden="true"></i>${STATES[state]}</span>
      <${ThemeButton} />
      ${apiKey() &&
      html`<button type="button" class="quiet" onClick=${forgetKey} title="Forget the API key of this tab">Forget key</button>`}
    </div>
  </header>`;
}

function ThemeButton() {
  const [choice, setChoice] = useState(pagewiseTheme.choice);
  const sign = { system: "◐", light: "☀", dark: "☾" }[choice];
  return html`<button type="button" class="quiet theme" onClick=${() => setChoice(pagewiseTheme.next())}>
    <span aria-hidden="true">${sign}</span><span class="hidden">Theme: </span>${choice}
  </button>`;
}

function Disconnected() {
  const { state, message } = store.connection;
  if (state !== "disconnected") return null;
  return html`<div class="notice bad" role="alert">
    <strong>Disconnected</strong>: ${message}. What you see is the last that was known. Trying again…
  </div>`;
}

function KeyForm() {
  const [key, setKey] = useState("");
  const submit = (event) => {
    event.preventDefault();
    setApiKey(key.trim());
    stream.restart();
  };
  return html`<form class="panel key-form" onSubmit=${submit}>
    <h2>This server has API keys</h2>
    <p>The console shows what all clients do, so it needs a key with an operator's rights. It is kept until this tab is closed.</p>
    ${apiKey() && html`<p class="notice bad" role="alert">${store.connection.message}</p>`}
    <label for="key">API key of an operator</label>
    <input
      id="key"
      type="password"
      autocomplete="current-password"
      required
      value=${key}
      onInput=${(event) => setKey(event.target.value)}
    />
    <button type="submit" class="main">Open the console</button>
  </form>`;
}

function forgetKey() {
  setApiKey("");
  store.fleet = store.requests = store.prefixes = null;
  store.clearMaps();
  stream.restart();
}

let announced = "";
let announcedAt = 0;

/** The most important caption, for those who listen: not more often than every five seconds. */
function Announcements() {
  const [first] = captions(store);
  const now = performance.now();
  if (first.tone !== "busy" && now - announcedAt > 5000) {
    const words = first.title.replace(/\d[\d,]*/g, "#");
    if (words !== announced.replace(/\d[\d,]*/g, "#")) {
      announced = first.title;
      announcedAt = now;
    }
  }
  return html`<div class="hidden" aria-live="polite">${announced}</div>`;
}

const root = document.getElementById("app");
root.replaceChildren();
openStream();
draw();
