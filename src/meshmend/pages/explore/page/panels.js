// What stands beside the picture: figures, the table of algorithms, the curve, next hops.

import { byId, element, figure, sizeWords, timeWords } from "./words.js";
import { series, theme } from "./colours.js";

const SVG = "http://www.w3.org/2000/svg";

// `isLast`: no searched answer will follow.
export function showFigures(plan, hole, question, isLive, isLast) {
  const ratio = plan.limit_s ? plan.time_s / plan.limit_s : 1, cards = [
    figure(`time of ${plan.algorithm}`, timeWords(plan.time_s),
      `${plan.slices} slice${plan.slices === 1 ? "" : "s"}`),
    figure("of the limit", `${ratio.toFixed(3)}×`, `limit ${timeWords(plan.limit_s)}`),
    figure(plan.tiling ? "tiles" : question.collective === "all-to-all" ? "chips that exchange" : "chips that sum",
      `${plan.tiling ? plan.tiling.tiles : plan.ranks}`, [plan.tiling?.words,
        plan.stranded.length ? `${plan.stranded.length} cut off` : plan.tiling ? "" : "all live ones"]
        .filter(Boolean).join("; ")),
    figure("busiest link", `${plan.max_load.toFixed(3)}×`, "the payload, each way"),
  ];
  const cost = question.fail.length ? "the hole costs" : "slow links cost";
  if (hole && hole.stage !== plan.stage) cards.splice(2, 0, figure(cost, "…",
    "still searched for: the mesh without it"));
  else if (hole) {
    const lost = hole.lost_chips ? `${hole.lost_chips} chip${hole.lost_chips === 1 ? "" : "s"} lost` : "";
    cards.splice(2, 0, figure(cost, hole.words,
      [`${timeWords(hole.full_s)} without it`, lost, hole.reason].filter(Boolean).join("; ")));
  }
  byId("figures").replaceChildren(...cards);
  const isFirst = plan.stage === "first";
  byId("answer").dataset.stage = plan.stage;
  byId("answer-title").textContent = isLive ? "A plan for the mesh as it is" : isFirst && !isLast ? "First answer" : "The plan";
  byId("limit-words").textContent = `Limit: ${plan.limit_words}.`;
  const proof = plan.proof === "exact" ? "contributions counted exactly" : `by ${plan.proof}`;
  byId("proof-words").textContent = `Proved: ${proof}, every hop alive, free of deadlock with `
    + `${plan.virtual_channels} virtual channel${plan.virtual_channels === 1 ? "" : "s"}; `
    + `${plan.rows.toLocaleString("en")} rows, ${plan.chunks.toLocaleString("en")} chunks.`;
  byId("note-words").textContent = [plan.note, isFirst && !isLive
    ? (isLast ? "Proved, but not searched for: a search finds plans that are some per cent faster." : "The searched answer follows.")
    : ""]
    .filter(Boolean).join(". ");
}

// A number and its unit stay on one line.
function joined(words) { return words.replaceAll(/(\d) (\S)/g, "$1\u00a0$2"); }

// What runs, and what it does with how much: "the sum of 100 MB takes".
function workWords(question, plan) {
  const payload = question.payload.replace(/(\d)([A-Za-z])/, "$1 $2");
  if (question.collective === "all-to-all") return `the all-to-all of ${payload} a chip takes`;
  if (question.tile) return `the sum over ${plan?.tiling?.words ?? `tiles of ${question.tile}`}, ${payload} each, takes`;
  return `the sum of ${payload} takes`;
}

// What a hole costs, in words for a room: see the figures for the rest.
export function headline(model, plan, hole, rows, question, isSearching) {
  const { chips, links } = model.failed, count = (n, what) => (n ? [`${n} ${what}${n === 1 ? "" : "s"}`] : []);
  const died = [...count(chips.size, "chip"), ...count(links.size, "link")].join(" and ");
  const slow = count(model.slow.size, "link").map((words) => `${words} ${model.slow.size === 1 ? "is" : "are"} slow`);
  const broken = [...(died ? [`${died} died`] : []), ...slow].join(" and ");
  if (!plan) return broken ? `${broken}. Planning …` : "Planning …";
  const takes = `${workWords(question, plan)} ${timeWords(plan.time_s)}`;
  if (!broken && plan.ranks === 1) return joined(`One chip has nothing to sum with, so ${takes}.`);
  if (!broken) return joined(`All ${plan.ranks} chips are alive, and ${takes}. Click one dead.`);
  const isKnown = hole && hole.stage === plan.stage, share = isKnown ? hole.time_s / hole.full_s - 1 : 0;
  const more = !isKnown ? "" : share < 0.0005 ? ", no longer than before" : `, ${(100 * share).toFixed(share < 0.1 ? 1 : 0)} % longer`;
  // What one does without meshmend, or without what it knows; each row says so in words.
  const least = rows.filter((row) => row.instead && row.name !== plan.algorithm)
    .sort((one, other) => one.time_s - other.time_s)[0];
  const without = least ? ` ${least.instead}: ${timeWords(least.time_s)}${least.chips < plan.ranks
    ? ` on ${least.chips} chips` : ""}.` : "";
  return joined(`${broken}. T${takes.slice(1)}${more}${isSearching ? "; still searching" : ""}.${without}`);
}

// Rows are fastest first; those that do not support the mesh are folded away, with their reasons.
export function showTable(rows, limitS) {
  const priced = rows.filter((row) => row.time_s !== undefined)
    .sort((one, other) => one.time_s - other.time_s);
  const refused = rows.filter((row) => row.time_s === undefined);
  const body = byId("table").tBodies[0];
  body.replaceChildren(
    ...priced.map((row, place) => element("tr", place === 0 ? { class: "best" } : {},
      element("td", {}, row.name), element("td", {}, timeWords(row.time_s)),
      element("td", {}, limitS ? `${(row.time_s / limitS).toFixed(3)}×` : "–"), element("td", {}, `${row.slices}`),
      element("td", {}, `${row.chips}`), element("td", { class: "left" }, row.detail))));
  byId("refused").hidden = !refused.length;
  byId("refused").firstElementChild.textContent = refused.length === 1 ? "One does not support this mesh"
    : `${refused.length} do not support this mesh`;
  byId("refused").lastElementChild.replaceChildren(...refused.flatMap((row) =>
    [element("dt", {}, row.name), element("dd", {}, row.why)]));
}

function mark(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export function showCurve(curves) {
  const box = { left: 52, right: 100, top: 8, bottom: 30, width: 560, height: 300 };
  if (!curves.length || curves.some((curve) => curve.times.some((time) => !(time > 0)))) { byId("curve").replaceChildren(); return; }
  const payloads = curves[0].payloads, times = curves.flatMap((curve) => curve.times);
  const [low, high] = [Math.min(...times), Math.max(...times)].map(Math.log10);
  const x = (bytes) => box.left + (Math.log10(bytes / payloads[0]) / Math.log10(payloads.at(-1)
    / payloads[0])) * (box.width - box.left - box.right);
  const y = (time) => box.height - box.bottom - (Math.log10(time) - low) / ((high - low) || 1)
    * (box.height - box.top - box.bottom);
  const svg = mark("svg", { viewBox: `0 0 ${box.width} ${box.height}`, role: "img",
    "aria-label": `Time against payload for ${curves.map((curve) => curve.name).join(", ")}` });
  for (const bytes of payloads) {
    svg.append(mark("line", { x1: x(bytes), x2: x(bytes), y1: box.top, y2: box.height - box.bottom,
      class: "axis" }), mark("text", { x: x(bytes), y: box.height - 12, "text-anchor": "middle" },
      sizeWords(bytes)));
  }
  for (let power = Math.ceil(low); power <= high; power++)
    svg.append(mark("line", { x1: box.left, x2: box.width - box.right, y1: y(10 ** power),
      y2: y(10 ** power), class: "axis" }), mark("text", { x: box.left - 6, y: y(10 ** power) + 4,
      "text-anchor": "end" }, timeWords(10 ** power)));
  const labels = curves.map((curve, index) => ({ curve, index, at: y(curve.times.at(-1)) + 4 }))
    .sort((one, other) => one.at - other.at);
  labels.forEach((label, place) => {
    if (place) label.at = Math.max(label.at, labels[place - 1].at + 13);
  });
  for (const { curve, index, at } of labels) {
    const isLimit = curve.name === "limit", colour = isLimit ? theme().limit : series(index - 1);
    const points = curve.times.map((time, place) => `${x(payloads[place])},${y(time)}`).join(" ");
    svg.append(mark("polyline", { points, fill: "none", stroke: colour, "stroke-width": 2,
      "stroke-dasharray": isLimit ? "5 4" : "none" }),
    mark("rect", { x: box.width - box.right + 6, y: at - 9, width: 10, height: 10, fill: colour }),
    mark("text", { x: box.width - box.right + 20, y: at }, curve.name));
  }
  byId("curve").replaceChildren(svg);
  byId("curve-table").replaceChildren(
    element("thead", {}, element("tr", {}, element("th", { scope: "col" }, "algorithm"),
      ...payloads.map((bytes) => element("th", { scope: "col" }, sizeWords(bytes))))),
    element("tbody", {}, ...curves.map((curve) => element("tr", {}, element("td", {}, curve.name),
      ...curve.times.map((time) => element("td", {}, timeWords(time)))))));
}

export function portWords(port, nAxes) {
  const axis = port >> 1, up = port & 1;
  if (axis === nAxes - 1) return up ? "right" : "left";
  if (axis === nAxes - 2) return up ? "down" : "up";
  return `axis ${axis} ${up ? "+1" : "−1"}`;
}

export function hopRows(table, geometry) {
  return table.ports.map((port, chip) => ({ chip, port })).filter(({ port }) => port >= 0)
    .map(({ chip, port }) => [geometry.name(chip), portWords(port, geometry.shape.length),
      geometry.name(geometry.neighbour(geometry.chipAt(table.chip), port)), table.hops[chip],
      table.virtual_channels ? table.virtual_channels[chip] : ""]);
}

const MOST_ROWS_SHOWN = 600;

export function showHops(table, geometry) {
  byId("hops").hidden = !table;
  if (!table) return;
  const rows = hopRows(table, geometry), heads = ["to", "leaves", "by chip", "hops", "virtual channel"];
  byId("hops-title").textContent = `Next hops of chip ${table.chip.join(",")}`;
  byId("hops-words").textContent = `${rows.length} destinations, at most `
    + `${Math.max(0, ...rows.map((row) => row[3]))} hops. The picture colours each chip by the port `
    + "that its messages leave by."
    + (rows.length > MOST_ROWS_SHOWN ? ` The first ${MOST_ROWS_SHOWN} are listed.` : "");
  byId("hops-table").replaceChildren(
    element("thead", {}, element("tr", {}, ...heads.map((head) => element("th", { scope: "col" }, head)))),
    element("tbody", {}, ...rows.slice(0, MOST_ROWS_SHOWN).map((row) => element("tr", {},
      ...row.map((value) => element("td", {}, `${value}`))))));
}
