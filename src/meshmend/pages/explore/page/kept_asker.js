// Answers from the file that the page came in, instead of from a server: see `kept_page.py`.
// A plan around one hole is a plan around each hole that a symmetry of the mesh makes of it.

import { Geometry, parseFailures, parseShape, parseSlow, parseWrap } from "./geometry.js";

const start = JSON.parse(document.getElementById("kept-start").textContent);
let kept = null; // base64 of each answer, read on the first question

export async function getJson(path) { return path === "start" ? start : { warm: true }; }

export async function* ask(path, question) {
  const { mesh, wrap } = question, shape = parseShape(mesh);
  const geometry = new Geometry(shape, parseWrap(wrap, shape.length));
  const found = findHole(parseFailures(question.fail, geometry, start.regions),
    parseSlow(question.slow, geometry), geometry);
  if (!found) {
    yield { kind: "error", why: "This file has plans for one hole at a time, and none for this one. To "
      + `plan any hole, run: meshmend explore --mesh ${mesh}${wrap === "none" ? "" : ` --wrap ${wrap}`}` };
    return;
  }
  const turned = turnedChannels(geometry, found.symmetry);
  if (path === "first" || path === "usual") {
    const { head } = await read(found.key), isUsual = path === "usual";
    for (const answer of head) {
      if (answer.kind === "plan" && !isUsual) yield planAround(answer, turned, geometry, found);
      else if ((answer.kind === "row") === isUsual && answer.kind !== "plan") yield answer;
    }
  } else if (path === "search" && kept.has(`${found.key}#search`)) yield* (await read(`${found.key}#search`)).head;
  else if (path === "timeline" && kept.has(`${found.key}#timeline`)) {
    const { head, bytes } = await read(`${found.key}#timeline`);
    yield { ...head, busy: framesAround(bytes, head.frames, turned) };
  }
}

export async function askOnce(path, question, kind) {
  for await (const answer of ask(path, question)) {
    if (answer.kind === kind) return answer;
    if (answer.kind === "error") throw new Error(answer.why);
  }
  throw new Error("This file has no answer to that.");
}

// JSON up to the first line break, then bytes.
async function read(key) {
  const packed = Uint8Array.from(atob(kept.get(key)), (sign) => sign.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  const all = new Uint8Array(await new Response(stream).arrayBuffer()), end = all.indexOf(10);
  const head = end < 0 ? all : all.subarray(0, end);
  return { head: JSON.parse(new TextDecoder().decode(head)), bytes: end < 0 ? null : all.subarray(end + 1) };
}

// The kept hole that a symmetry makes of this one, and that symmetry; null if there is none.
function findHole(failed, slow, geometry) {
  kept ??= new Map(document.getElementById("kept-answers").textContent.split("\n").filter(Boolean)
    .map((line) => line.split(" ")));
  const ends = (link) => link.split("-").map(Number), links = [...failed.links].map(ends);
  for (const symmetry of symmetries(geometry)) {
    const key = holeKey([...failed.chips].map((chip) => turnedChip(geometry, symmetry, chip)),
      links.map((pair) => pair.map((chip) => turnedChip(geometry, symmetry, chip))),
      [...slow].map(([link, speed]) => [ends(link).map((chip) => turnedChip(geometry, symmetry, chip)), speed]));
    if (kept.has(key)) return { key, symmetry };
  }
  return null;
}

function holeKey(chips, links, slow) {
  const rising = (pair) => pair.sort((a, b) => a - b), byEnds = (a, b) => a[0] - b[0] || a[1] - b[1];
  const ends = links.map(rising).sort(byEnds);
  const speeds = slow.map(([pair, speed]) => [rising(pair), speed]).sort(([one], [other]) => byEnds(one, other));
  return `${chips.sort((a, b) => a - b)}|${ends.map((pair) => pair.join("-"))}`
    + (speeds.length ? `|${speeds.map(([pair, speed]) => `${pair.join("-")}=${speed}`)}` : "");
}

// Each axis is mirrored or not, then turned if it wraps around: see `symmetry.py`.
function* symmetries({ shape, wrap }) {
  const moves = shape.map((size, axis) => [...Array(wrap[axis] ? size : 1).keys()]
    .flatMap((by) => [{ isMirrored: false, by }, { isMirrored: true, by }]));
  const chosen = moves.map(() => 0);
  for (;;) {
    yield chosen.map((choice, axis) => moves[axis][choice]);
    let axis = 0;
    while (axis < chosen.length && ++chosen[axis] === moves[axis].length) chosen[axis++] = 0;
    if (axis === chosen.length) return;
  }
}

function turnedChip(geometry, symmetry, chip) {
  const at = geometry.coordinates(chip), { shape } = geometry;
  return geometry.chipAt(symmetry.map(({ isMirrored, by }, axis) =>
    ((isMirrored ? shape[axis] - 1 - at[axis] : at[axis]) + by) % shape[axis]));
}

// The channel of the kept plan for each channel of the plan that is shown.
function turnedChannels(geometry, symmetry) {
  const { nPorts, nChips } = geometry, turned = new Int32Array(nChips * nPorts);
  const ports = symmetry.flatMap(({ isMirrored }, axis) => (isMirrored ? [2 * axis + 1, 2 * axis] : [2 * axis, 2 * axis + 1]));
  for (let chip = 0; chip < nChips; chip++) {
    const there = turnedChip(geometry, symmetry, chip);
    ports.forEach((port, from) => { turned[chip * nPorts + from] = there * nPorts + port; });
  }
  return turned;
}

function planAround(answer, turned, geometry, { symmetry }) {
  const back = new Int32Array(turned.length);
  turned.forEach((there, here) => { back[there] = here; });
  const sums = (steps) => { let at = 0; return steps.map((step) => back[at += step]); };
  const stranded = new Set(answer.stranded.map((chip) => geometry.chipAt(chip)));
  const there = [...Array(geometry.nChips).keys()].map((chip) => turnedChip(geometry, symmetry, chip));
  const chips = [...there.keys()].filter((chip) => stranded.has(there[chip])), { tiling } = answer;
  return { ...answer,
    loads: Array.from(turned, (there) => answer.load_values[answer.loads[there]]),
    flows: answer.flows.map((flow) => ({ ...flow, parts: flow.parts.map(sums) })),
    tiling: tiling && { ...tiling, tile_of: there.map((chip) => tiling.tile_of[chip]),
      colour_of: there.map((chip) => tiling.colour_of[chip]) },
    stranded: chips.map((chip) => geometry.coordinates(chip)) };
}

// Shades of a sixteenth, channel by channel, as bytes frame by frame.
function framesAround(shades, frames, turned) {
  const busy = new Uint8Array(frames * turned.length);
  turned.forEach((there, here) => {
    for (let frame = 0; frame < frames; frame++) busy[frame * turned.length + here] = 17 * shades[there * frames + frame];
  });
  return busy;
}
