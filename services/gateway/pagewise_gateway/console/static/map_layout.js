// Where blocks are drawn: rows of square cells, each of which stands for one block or for several that follow each other.

const SMALLEST = 4;

/** How many cells fit on a map of this size without becoming unreadable. */
export function cellsFor(width, height) {
  const side = width < 500 ? 9 : 11;
  return Math.max(64, Math.min(4096, Math.floor((width * height) / (side * side))));
}

/**
 * The grid of blocks `first` to `first + count` in `width` × `height` pixels, in squares of at most `largest` pixels.
 * Returns {first, count, perCell, cells, columns, rows, pitch, height}, `pitch` in pixels.
 */
export function layOut(width, height, first, count, perCell, largest) {
  const cells = Math.max(1, Math.ceil(count / perCell));
  let pitch = Math.min(largest, Math.floor(Math.sqrt((width * height) / cells)));
  while (pitch > SMALLEST && Math.ceil(cells / Math.floor(width / pitch)) * pitch > height) pitch -= 1;
  pitch = Math.max(pitch, SMALLEST);
  const columns = Math.max(1, Math.floor(width / pitch));
  const rows = Math.ceil(cells / columns);
  return { first, count, perCell, cells, columns, rows, pitch, height: rows * pitch };
}

/** The part of the pool that is seen after zooming by `factor` around `block`. At least 16 blocks. */
export function zoomed({ first, count }, numBlocks, block, factor) {
  const next = Math.max(Math.min(16, numBlocks), Math.min(numBlocks, Math.round(count * factor)));
  const share = count ? (block - first) / count : 0;
  return clamped(Math.round(block - share * next), next, numBlocks);
}

/** Moved by so many blocks. */
export function panned({ first, count }, numBlocks, blocks) {
  return clamped(first + blocks, count, numBlocks);
}

function clamped(first, count, numBlocks) {
  return { first: Math.max(0, Math.min(first, numBlocks - count)), count };
}

/** What kind of change leads from one state to another. */
export function changeKind(before, after) {
  if (after === "copying") return "copying";
  if (before === "cached" && after === "free") return "evicted";
  if (after === "in use" || after === "lent") return "taken";
  if (after === "cached" && before !== "in use" && before !== "lent") return "arrived";
  return "released";
}
