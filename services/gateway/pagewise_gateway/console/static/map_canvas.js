// One memory map: a canvas that is used with a pointer or with keys.

import { count, unitOf } from "./format.js";
import { panned, zoomed } from "./map_layout.js";
import { MapPainter } from "./map_painter.js";
import { html, useEffect, useLayoutEffect, useRef, useState } from "./htm-preact.js";

const LARGEST = 44; // pixels of a square
const LARGEST_OF_ONE = 140; // where one map has the room for itself

/**
 * `map`: of store.js. `view`: {first, count}, the blocks to be shown. `height`: the most pixels it may take.
 * `cursor`: the block that is pointed at, or -1. `onPoint(block)`, `onPin(block)`, `onView({first, count} or null for
 * the whole pool)`, `onLeave()` for Escape. `free`: whether the wheel and dragging change the view.
 */
export function MapCanvas({ map, view, height, cursor, summary, free, onPoint, onPin, onView, onLeave, onChanges }) {
  const canvas = useRef();
  const painter = useRef();
  const drag = useRef();
  const [width, setWidth] = useState(0);
  const now = useRef();
  now.current = { map, view, free, onPoint, onPin, onView, onLeave, cursor };

  useLayoutEffect(() => {
    painter.current = new MapPainter(canvas.current);
    const watch = new ResizeObserver(([entry]) => setWidth(Math.floor(entry.contentRect.width)));
    watch.observe(canvas.current.parentElement);
    const wheel = (event) => onWheel(event, now.current, painter.current);
    // Preact would make it passive, and the page would scroll too.
    canvas.current.addEventListener("wheel", wheel, { passive: false });
    return () => {
      watch.disconnect();
      painter.current.close();
    };
  }, []);

  useLayoutEffect(() => {
    if (width < 8) return;
    painter.current.show(map, view, width, height, free ? LARGEST_OF_ONE : LARGEST, cursor);
  });

  useEffect(() => onChanges?.(painter.current.changes), [map]);

  const blockAt = (event) => painter.current.blockAt(event.offsetX, event.offsetY);
  const partial = view.count < map.num_blocks;
  return html`<div
    class=${`map-frame${partial ? " zoomed" : ""}`}
    role="application"
    aria-roledescription="memory map"
    aria-label=${summary}
    aria-describedby="map-keys"
    tabindex="0"
    style=${{ minHeight: free ? `${height}px` : "" }}
    onKeyDown=${(event) => onKey(event, now.current, painter.current.grid)}
    onFocus=${() => cursor < 0 && onPoint(view.first)}
  >
    <canvas
      ref=${canvas}
      aria-hidden="true"
      onPointerDown=${(event) => {
        if (free && partial) event.target.setPointerCapture(event.pointerId);
        drag.current = { x: event.offsetX, y: event.offsetY, first: view.first, moved: false };
      }}
      onPointerMove=${(event) => {
        if (drag.current && event.buttons && free && partial) onDrag(event, drag.current, now.current, painter.current.grid);
        else onPoint(blockAt(event));
      }}
      onPointerUp=${(event) => {
        if (drag.current && !drag.current.moved) onPin(blockAt(event));
        drag.current = null;
      }}
      onDblClick=${(event) => zoom(now.current, blockAt(event), 0.25)}
      onPointerLeave=${() => onPoint(-1)}
    ></canvas>
  </div>`;
}

/** What is shown of a pool, in words. */
export function summaryOf(map, executor) {
  const { counts = {} } = executor;
  const states = Object.entries(counts)
    .filter(([, blocks]) => blocks > 0)
    .map(([state, blocks]) => `${blocks} ${state.replaceAll("_", " ")}`);
  const tier = map.tier === "device" ? states.join(", ") : usedOf(executor, map.tier);
  return `Memory map of ${map.executor_id}, ${map.tier}: ${count(map.num_blocks, unitOf(map))}; ${tier || "nothing known"}`;
}

function usedOf(executor, tier) {
  const pool = executor.tiers?.[tier];
  return pool ? `${pool.used} used` : "";
}

function zoom({ map, view, onView, free }, block, factor) {
  const middle = block < 0 ? view.first + view.count / 2 : block;
  const next = zoomed(view, map.num_blocks, middle, factor);
  if (!free && factor >= 1) return;
  onView(next.count >= map.num_blocks && free ? null : next);
}

function onWheel(event, state, painter) {
  const { free, view, map } = state;
  const whole = view.count >= map.num_blocks;
  if (!event.ctrlKey && (!free || (whole && event.deltaY > 0))) return; // the page scrolls
  event.preventDefault();
  zoom(state, painter.blockAt(event.offsetX, event.offsetY), Math.exp(Math.max(-1, Math.min(1, event.deltaY / 300))));
}

function onDrag(event, drag, { map, view, onView }, grid) {
  const rows = Math.round((event.offsetY - drag.y) / grid.pitch);
  const columns = Math.round((event.offsetX - drag.x) / grid.pitch);
  if (rows || columns) drag.moved = true;
  if (drag.moved) onView(panned({ ...view, first: drag.first }, map.num_blocks, -(rows * grid.columns + columns) * grid.perCell));
}

const STEPS = {
  ArrowLeft: () => -1,
  ArrowRight: () => 1,
  ArrowUp: ({ columns }) => -columns,
  ArrowDown: ({ columns }) => columns,
  Home: () => -Infinity,
  End: () => Infinity,
};

function onKey(event, state, grid) {
  const { map, view, cursor, onPoint, onPin, onView, onLeave } = state;
  if (!grid || event.altKey || event.metaKey) return;
  const at = cursor < 0 ? view.first : cursor;
  const page = Math.max(1, Math.floor(view.count / 2));
  if (event.key in STEPS) move(STEPS[event.key](grid) * grid.perCell, at, state);
  else if (event.key === "+" || event.key === "=") zoom(state, at, 0.5);
  else if (event.key === "-") zoom(state, at, 2);
  else if (event.key === "0") onView(null);
  else if (event.key === "PageDown" || event.key === "PageUp") {
    const next = panned(view, map.num_blocks, event.key === "PageDown" ? page : -page);
    onView(next);
    onPoint(next.first);
  } else if (event.key === "Enter" || event.key === " ") onPin(at);
  else if (event.key === "Escape") onLeave();
  else return;
  event.preventDefault();
}

function move(blocks, at, { map, view, onPoint, onView, free }) {
  const next = Math.max(0, Math.min(map.num_blocks - 1, at + blocks));
  // The cursor takes the view with it.
  if (free && next < view.first) onView(panned(view, map.num_blocks, next - view.first));
  if (free && next >= view.first + view.count) onView(panned(view, map.num_blocks, next - view.first - view.count + 1));
  onPoint(next);
}
