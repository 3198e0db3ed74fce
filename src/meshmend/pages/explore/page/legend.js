// What the colours of the picture mean.

import { byId, element } from "./words.js";
import { MOST_LOAD, SHADES, heat, series, shadeOfLoad, theme } from "./colours.js";
import { portWords } from "./panels.js";

function key(colour, words) {
  const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = colour;
  return element("span", { class: "key" }, swatch, words);
}

function scale(from, to, words) {
  const bar = element("span", { class: "scale", "aria-hidden": "true" });
  for (let shade = 0; shade < SHADES; shade += 2) {
    const step = element("span");
    step.style.background = heat(shade);
    bar.append(step);
  }
  return element("span", { class: "key" }, from, bar, to, ` ${words}`);
}

export function showLegend(model, show, flow, part, tableOfChip) {
  const keys = [];
  if (show === "load" && model.plan) {
    keys.push(scale("0", `${MOST_LOAD} and more`,
      `× the payload, each way; one scale for all algorithms (${shadeOfLoad(0.5) > 0 ? "half way: " : ""}`
      + `${(MOST_LOAD / 4).toFixed(1)})`));
  } else if (show === "schedule") keys.push(scale("idle", "busy", "part of the frame"));
  else if (show === "flows" && flow) {
    const many = flow.parts.length;
    if (part < 0) keys.push(element("span", { class: "key" }, `${many} ${flow.kind}${many === 1 ? "" : "s"}, `
      + "a colour each; colours repeat after eight"));
    else keys.push(key(series(part), `${flow.kind} ${part} of ${many}`));
  } else if (show === "hops" && tableOfChip) {
    const used = [...new Set(tableOfChip.ports.filter((port) => port >= 0))].sort((a, b) => a - b);
    used.forEach((port) => keys.push(key(series(port), portWords(port, model.geometry.shape.length))));
  }
  if (model.failed.chips.size) keys.push(key(theme().failed, "failed"));
  if (model.stranded.size) keys.push(key(theme().stranded, "cut off"));
  if (model.failed.links.size) keys.push(key(theme().cut, "failed link"));
  (model.keys ?? []).forEach(([colour, words]) => keys.push(key(colour, words)));
  byId("legend").replaceChildren(...keys);
}
