// What the colours of the picture mean.

import { byId, element } from "./words.js";
import { SHADES, heat, series, theme } from "./colours.js";
import { portWords } from "./panels.js";

function key(colour, words) {
  if (!colour) return element("span", { class: "key" }, words);
  const swatch = element("span", { class: "swatch", "aria-hidden": "true" });
  swatch.style.background = colour;
  return element("span", { class: "key" }, swatch, words);
}

const percent = (share) => `${(100 * share).toFixed(1)} %`;

function scale(from, to, words) {
  const bar = element("span", { class: "scale", "aria-hidden": "true" });
  for (let shade = 0; shade < SHADES; shade += 2) {
    const step = element("span");
    step.style.background = heat(shade);
    bar.append(step);
  }
  return element("span", { class: "key" }, from, bar, to, ` ${words}`);
}

export function showLegend(model, show, flow, part, tableOfChip, costs) {
  const keys = [];
  if (show === "load" && model.plan) {
    keys.push(scale("idle", `${model.plan.max_load.toFixed(2)}×`, "the payload goes over this link, each way"));
  } else if (show === "heat") {
    if (costs.most > 0 || !costs.isPartial) keys.push(costs.most > 0 ? scale("nothing", `${percent(costs.most)} longer`, "if this chip or link fails alone")
      : element("span", { class: "key" }, "no single chip or link costs anything"));
    if (costs.isPartial) keys.push(element("span", { class: "key" }, `${costs.count} computed so far …`));
  } else if (show === "schedule") keys.push(scale("idle", "busy", "part of this moment"));
  else if (show === "flows" && flow) {
    const many = flow.parts.length;
    if (part < 0) keys.push(element("span", { class: "key" }, `${many} ${flow.kind}${many === 1 ? "" : "s"}, `
      + "a colour each; gradients are summed along the arrows, sums go back the same ways"));
    else keys.push(key(series(part), `${flow.kind} ${part} of ${many}: gradients are summed along the arrows, sums go back the same way`));
  } else if (show === "hops" && tableOfChip) {
    const used = [...new Set(tableOfChip.ports.filter((port) => port >= 0))].sort((a, b) => a - b);
    used.forEach((port) => keys.push(key(series(port), portWords(port, model.geometry.shape.length))));
  }
  if (model.failed.chips.size) keys.push(key(theme().failed, "failed"));
  if (model.stranded.size) keys.push(key(theme().stranded, "cut off"));
  if (model.failed.links.size) keys.push(key(theme().cut, "failed link"));
  if (model.slow.size) keys.push(key(theme().slow, "slow link"));
  (model.keys ?? []).forEach(([colour, words]) => keys.push(key(colour, words)));
  byId("legend").replaceChildren(...keys);
}
