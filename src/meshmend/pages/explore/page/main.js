// The explorer: joins question, picture and answers.

import { ask, askOnce, getJson } from "./asker.js";
import { heat, onThemeChange, series, shadeOf, theme, tint } from "./colours.js";
import { Geometry, failureWords, parseFailures, parseShape, parseSlow, parseWrap, slowWords } from "./geometry.js";
import { showLegend } from "./legend.js";
import { Job } from "./live.js";
import { headline, hopRows, showCurve, showFigures, showHops, showTable } from "./panels.js";
import { Player } from "./player.js";
import { cursorScene, flowScene, frameScene, grown, heatScene, linkScene, loadScene, meshScene, svgText }
  from "./scene.js";
import { State } from "./state.js";
import { View } from "./view.js";
import { byId, csv, download, element, timeWords } from "./words.js";

const SEARCH_AFTER_MS = 300;
const SLOW_SPEED = 0.25; // of a link that a click slows
const TEXTS = ["mesh", "wrap", "payload", "fabric", "algorithm"];
const GROW_MS = 900; // how long trees take to grow after a click
const MOST_GROWN = 3; // of them, because more hide each other
const stillness = matchMedia("(prefers-reduced-motion: reduce)");
let start, state, model, view, player, job;
let hole = null, rows = [], curves = [], hops = null, cursor = -1, asking = null, number = 0;
let scene = [], drawnStates = "", isSearching = false, isGrowing = false;
let costs = null, costsOf = "", askingCosts = null;

async function main() {
  start = await getJson("start");
  state = new State(start.question);
  state.question.payload = state.question.payload.replace(/(\d)000000B$/, "$1MB");
  state.read(location.hash);
  fillChoices();
  view = new View(byId("canvas"), click, hover);
  player = new Player(() => drawSchedule(), () => loadTimeline(), () => showView("schedule"));
  listen();
  if (start.live) beginLive();
  if (start.kept) beginKept();
  apply();
  if (!start.warm) {
    setStatus("Loading the planner; the first use on a machine compiles for a minute or two …");
    await getJson("warm");
    if (!model?.plan) setStatus("Planning …");
  }
}

function beginLive() {
  for (const name of ["mesh", "wrap", "fail", "undo", "redo", "repair", "machine"]) byId(name).disabled = true;
  for (const name of ["work", "slow"]) byId(name).parentElement.hidden = true;
  for (const each of document.querySelectorAll("input[name=tool]")) {
    const isNoFault = start.allow_faults ? ["host", "slow"].includes(each.value) : each.value !== "look";
    if (isNoFault) each.parentElement.hidden = true;
    each.checked = each.value === "look";
  }
  byId("fault-label").hidden = !start.allow_faults;
  byId("algorithms").hidden = byId("payloads").hidden = true; // a search takes time from workers
  job = new Job(takeStatus);
}

// A page in a file has plans for one question, and for one hole at a time.
function beginKept() {
  const { units } = start.kept;
  for (const name of [...TEXTS, "fail", "slow", "machine", "work"]) {
    byId(name).disabled = true;
    byId(name).parentElement.hidden = true;
  }
  const { mesh, wrap, payload, fabric, collective, tile } = start.question;
  const work = tile ? `tiles of ${tile}, ` : collective === "allreduce" ? "" : `${collective}, `;
  document.querySelector("h1").textContent = `meshmend on ${mesh}${wrap === "none" ? "" : `, wrap ${wrap}`}: `
    + `${work}${payload} over ${fabric}`;
  for (const each of document.querySelectorAll("input[name=tool]")) {
    each.parentElement.hidden = !units[each.value];
    each.checked = each.value === Object.keys(units).find((unit) => units[unit]);
  }
  byId("plan").hidden = byId("get-plan").hidden = byId("show-hops").hidden = true; // a server makes these
  if (state.view.show === "hops") state.view.show = "load";
}

// The mesh as it is now: chips without a worker count as failed.
function takeStatus(status) {
  const shape = status.shape, geometry = new Geometry(shape, parseWrap(state.question.wrap, shape.length));
  const known = new Set([...status.members, ...status.waiting].map((chip) => geometry.chipAt(chip)));
  const dead = Array.from({ length: geometry.nChips }, (_, chip) => chip).filter((chip) => !known.has(chip));
  const cut = parseFailures(status.cut, geometry, {}).links;
  const fail = failureWords(new Set(known.size ? dead : []), cut, geometry), mesh = shape.join("x");
  if (mesh !== state.question.mesh || `${fail}` !== `${state.question.fail}`) {
    state.question = { ...state.question, mesh, fail };
    apply();
  } else if (`${status.waiting};${status.behind}` !== drawnStates) draw();
  drawnStates = `${status.waiting};${status.behind}`;
}

function liveStateOf(chip) {
  const has = (list) => list?.some((each) => model.geometry.chipAt(each) === chip), { status } = job;
  if (!status) return null;
  if (has(status.behind)) return "behind";
  if (has(status.waiting)) return "waiting";
  return has(status.members) ? "training" : null;
}

function fillChoices() {
  byId("fabric").replaceChildren(...Object.entries(start.fabrics).map(([name, words]) =>
    element("option", { value: name, title: words }, name)));
  byId("machine").append(...start.machines.map(({ name }) => element("option", { value: name }, name)));
  byId("work").replaceChildren(element("option", { value: "allreduce" }, "a sum over all chips"),
    ...start.tiles.map((tile) => element("option", { value: `tile ${tile}` }, `sums of tiles of ${tile}`)),
    element("option", { value: "all-to-all" }, "an all-to-all"));
}

// The algorithms of what runs; tiles have one plan, an all-to-all has no trees to show.
function fillAlgorithms() {
  const { collective, tile } = state.question, isAllToAll = collective === "all-to-all";
  const names = tile ? ["auto"] : start.algorithms[collective] ?? ["auto"];
  if (`${[...byId("algorithm").options].map(({ value }) => value)}` !== `${names}`)
    byId("algorithm").replaceChildren(...names.map((name) => element("option", { value: name }, name)));
  byId("show-flows").hidden = byId("show-flows").disabled = isAllToAll;
  if (isAllToAll && state.view.show === "flows") state.view.show = "load";
}

function setStatus(words) { byId("status").textContent = words; }

function setProblem(words) {
  byId("problem").hidden = !words;
  byId("problem").textContent = words;
}

// Shows the state's question at once, and asks for its answers.
function apply() {
  const { question } = state;
  fillAlgorithms();
  for (const name of TEXTS) byId(name).value = question[name];
  for (const name of ["fail", "slow"]) byId(name).value = question[name].join(" ");
  byId("work").value = question.tile ? `tile ${question.tile}` : question.collective;
  byId("show").value = state.view.show;
  byId("undo").disabled = !state.past.length;
  byId("redo").disabled = !state.future.length;
  byId("machine").value = start.machines.find((each) => ["mesh", "wrap", "fabric"]
    .every((name) => each[name] === question[name]))?.name ?? "";
  history.replaceState(null, "", state.fragment());
  try {
    const shape = parseShape(question.mesh), geometry = new Geometry(shape, parseWrap(question.wrap, shape.length));
    if (geometry.nChips > start.most_chips)
      throw new Error(`The explorer draws at most ${start.most_chips} chips.`);
    const failed = parseFailures(question.fail, geometry, start.regions);
    const isSameMesh = model && `${model.geometry.shape}` === `${shape}`;
    model = { geometry, failed, slow: parseSlow(question.slow, geometry), stranded: new Set(), plan: null };
    if (!isSameMesh || cursor >= geometry.nChips) { cursor = -1; hops = null; }
    setProblem("");
    if (failed.chips.size === geometry.nChips) throw new Error("A mesh needs at least one live chip.");
  } catch (error) {
    asking?.abort();
    setProblem(error.message);
    setStatus("No answer.");
    draw();
    return;
  }
  player.clear();
  fillLayers();
  askAll(); // before the picture, which is painted while the planner plans
  draw();
  if (state.view.show === "heat") loadCosts();
}

function fillLayers() {
  const { geometry } = model, count = geometry.nLayers;
  byId("layer-label").hidden = count < 2;
  if (byId("layer").options.length === count + 1) return;
  byId("layer").replaceChildren(element("option", { value: "-1" }, "all"),
    ...Array.from({ length: count }, (_, layer) =>
      element("option", { value: `${layer}` }, geometry.layerName(layer))));
}

function showLayer() {
  const { geometry } = model, layer = Number(byId("layer").value);
  if (layer < 0) { view.fit(); return; }
  const [x, y] = [layer % geometry.layersPerRow, Math.floor(layer / geometry.layersPerRow)];
  view.focus(x * geometry.layerWidth, y * geometry.layerHeight, geometry.layerWidth, geometry.layerHeight);
}

async function askAll() {
  asking?.abort();
  const { signal } = asking = new AbortController(), question = state.question;
  const asked = ++number, begun = performance.now();
  [hole, rows, curves] = [null, [], []];
  byId("answer").dataset.stage = "none";
  byId("answer").dataset.asked = `${asked}`;
  showTable(rows, 1);
  showCurve(curves);
  if (start.kept) byId("payloads").hidden = true; // until the file turns out to have it
  setStatus("Planning …");
  isSearching = !start.live && !start.kept;
  say();
  byId("search-words").textContent = "";
  const take = (answer) => takeAnswer(answer, begun);
  try {
    for await (const answer of ask("first", question, signal)) take(answer);
    if (state.view.show === "hops") loadHops();
    if (!start.live) for await (const answer of ask("usual", question, signal)) take(answer);
    await new Promise((resolve) => setTimeout(resolve, SEARCH_AFTER_MS));
    if (signal.aborted || start.live) return; // a search would take time from the job's workers
    for await (const answer of ask("search", question, signal)) take(answer);
    isSearching = false;
    say();
    byId("search-words").textContent = "";
  } catch (error) {
    if (signal.aborted) return;
    setProblem(start.kept ? error.message : `The explorer cannot reach its server: ${error.message}`);
  }
}

// The plan stands among the others, also before the search has priced it.
function fillTable() {
  const { plan } = model;
  if (!plan) return;
  const own = { name: plan.algorithm, time_s: plan.time_s, slices: plan.slices, chips: plan.ranks, detail: "the plan that is shown" };
  showTable(rows.some((row) => row.name === own.name) || !rows.length ? rows : [own, ...rows], plan.limit_s);
}

function say() {
  byId("headline").textContent = headline(model, model.plan, hole, rows, state.question,
    isSearching && model.plan?.stage === "first");
}

function takeAnswer(answer, begun) {
  if (answer.kind === "plan") takePlan(answer, begun);
  else if (answer.kind === "hole") { hole = answer; say(); showAnswer(); }
  else if (answer.kind === "row") {
    rows = [...rows.filter((row) => row.name !== answer.name), { ...rows.find((row) => row.name === answer.name), ...answer }];
    fillTable();
    say();
  } else if (answer.kind === "curve") { curves = [...curves, answer]; byId("payloads").hidden = start.live; showCurve(curves); }
  else if (answer.kind === "refused") setProblem(`${answer.algorithm} does not support this mesh: ${answer.why}`);
  else if (answer.kind === "error") { setProblem(answer.why); setStatus("No answer."); }
  else if (answer.kind === "progress" && !["search", "first"].includes(answer.step)) {
    const part = answer.part ? `, ${Math.round(100 * answer.part)} %` : "";
    byId("search-words").textContent = `Searching: ${answer.step}${part}`;
  }
}

function showAnswer() { showFigures(model.plan, hole, state.question, start.live, !!start.kept); }

function takePlan(plan, begun) {
  model.plan = plan;
  model.stranded = new Set(plan.stranded.map((chip) => model.geometry.chipAt(chip)));
  showAnswer();
  const ratio = plan.limit_s ? ` (${(plan.time_s / plan.limit_s).toFixed(2)}× the limit)` : "";
  performance.measure(`${plan.stage} answer`, { start: begun });
  const took = ((performance.now() - begun) / 1000).toFixed(2);
  const how = start.kept ? "" : `${plan.stage === "first" ? "First answer" : "Searched"} after ${took} s: `;
  setStatus(`${how}${plan.algorithm} takes ${timeWords(plan.time_s)}${ratio}.`);
  fillFlows();
  fillTable();
  player.clear();
  isGrowing = false;
  draw();
  say();
  if (state.view.show === "schedule") loadTimeline();
  else if (plan.stage === "first" || start.kept) grow();
}

// Lets the trees of a new plan grow over the mesh, then shows what was asked for.
function grow() {
  const plan = model.plan, flow = chosenFlow(), { geometry } = model;
  if (stillness.matches || job || !flow || geometry.nChips > 1100 || !["load", "flows"].includes(state.view.show)) return;
  const shown = state.view.show === "flows" && Number(byId("part").value) >= 0 ? Number(byId("part").value) + 1 : MOST_GROWN;
  const ways = grown(flow, geometry, shown), begun = performance.now();
  const only = state.view.show === "flows" && shown !== MOST_GROWN ? shown - 1 : -1;
  isGrowing = true;
  draw();
  const step = (now) => {
    const share = (now - begun) / GROW_MS;
    if (model.plan !== plan || !isGrowing) return; // another plan, or another picture
    if (share >= 1.4) { isGrowing = false; draw(); return; }
    view.showOverlay([...flowScene(model, ways(Math.max(0, Math.min(1, share))), only), ...cursorScene(geometry, cursor)]);
    requestAnimationFrame(step);
  };
  requestAnimationFrame(step);
}

function fillFlows() {
  const { flows } = model.plan, before = byId("phase").selectedIndex;
  byId("phase").replaceChildren(...flows.map((flow, index) =>
    element("option", { value: `${index}` }, flow.name)));
  byId("phase").selectedIndex = Math.min(Math.max(0, before), flows.length - 1);
  fillParts();
}

function fillParts() {
  const flow = model.plan.flows[byId("phase").selectedIndex], before = byId("part").value;
  const count = flow?.parts.length ?? 0;
  byId("part").replaceChildren(element("option", { value: "-1" }, "all"),
    ...Array.from({ length: count }, (_, part) =>
      element("option", { value: `${part}` }, `${flow.kind} ${part}`)));
  // Many trees over each other show nothing, so one is shown first.
  const usual = flow?.kind === "tree" && count > 4 ? "0" : "-1";
  byId("part").value = Number(before) < count && before !== "" ? before : usual;
}

function chosenFlow() { return model.plan?.flows[byId("phase").selectedIndex]; }

function draw() {
  if (!model) return;
  const { show } = state.view, { geometry, plan } = model, part = Number(byId("part").value || -1);
  byId("phase-label").hidden = byId("part-label").hidden = show !== "flows";
  byId("time-label").hidden = byId("slice-label").hidden = byId("time-words").hidden = show !== "schedule";
  byId("player").hidden = !plan;
  model.fillOf = show === "hops" && hops
    ? (chip) => (hops.ports[chip] >= 0 ? series(hops.ports[chip]) : null) : null;
  if (job) {
    model.stateOf = liveStateOf;
    model.keys = [[theme().waiting, "waits"], [theme().forming, "behind the others"]];
    const fills = { behind: theme().forming, waiting: theme().waiting };
    if (!model.fillOf) model.fillOf = (chip) => fills[liveStateOf(chip)] ?? null;
  }
  const tiling = plan?.tiling;
  if (tiling && !model.fillOf) {
    model.fillOf = (chip) => (tiling.colour_of[chip] >= 0 ? tint(tiling.colour_of[chip])
      : model.stranded.has(chip) ? null : theme().waiting);
    model.keys = tileKeys(tiling);
  }
  if (show === "heat" && costs) model.fillOf = (chip) => {
    const shade = costs.shade(costs.chips.get(chip));
    return shade < 0 ? null : heat(shade);
  };
  showHops(show === "hops" ? hops : null, geometry);
  scene = meshScene(model);
  if (show === "load" && plan && !isGrowing) scene = [...loadScene(model), ...scene];
  else if (show === "flows" && chosenFlow())
    scene = [...linkScene(model), ...scene, ...flowScene(model, chosenFlow(), part)];
  else if (show === "heat" && costs) scene = [...linkScene(model), ...heatScene(model, costs), ...scene];
  else scene = [...linkScene(model), ...scene];
  view.show(scene, [geometry.width, geometry.height]);
  if (show === "schedule") drawSchedule(); else drawCursor();
  showLegend(model, show, chosenFlow(), part, hops, costs ?? new Costs());
  byId("canvas").setAttribute("aria-label", `Mesh ${state.question.mesh}, `
    + `${model.failed.chips.size} chips and ${model.failed.links.size} links failed`
    + (model.slow.size ? `, ${model.slow.size} slow` : ""));
}

function tileKeys({ tiles, colours, tile_of: tileOf }) {
  const nLive = model.geometry.nChips - model.failed.chips.size - model.stranded.size;
  const isSpare = nLive > tileOf.filter((tile) => tile >= 0).length;
  const shown = Array.from({ length: Math.min(colours, 4) }, (_, colour) => [tint(colour), `colour ${colour}`]);
  if (colours > 4) shown.push([tint(4), `… ${colours} colours in all`]);
  if (tiles > 1) shown.push([null, "borders are tiles; chips of one colour hold the same part and sum it"]);
  return isSpare ? [...shown, [theme().waiting, "spare: in no tile, passes messages on"]] : shown;
}

function drawSchedule() {
  const timeline = player.timeline;
  const busy = timeline ? frameScene(model, timeline.busy, Number(byId("time").value), player.nChannels) : [];
  view.showOverlay([...busy, ...cursorScene(model.geometry, cursor)]);
}

function drawCursor() { view.showOverlay(cursorScene(model.geometry, cursor)); }

// What each chip and each link costs if it fails alone; `shade` of one that is not known is -1.
class Costs {
  chips = new Map();
  links = new Map();
  most = 0;
  count = 0;
  isPartial = false;

  add(hole, time, full) {
    const [chip, link] = hole.split("|"), cost = Math.max(0, time / full - 1);
    if (link) this.links.set(link, cost); else this.chips.set(Number(chip), cost);
    this.most = Math.max(this.most, cost);
    this.count++;
  }

  shade(cost) { return cost === undefined ? -1 : shadeOf(this.most ? cost / this.most : 0); }
}

// The costs of a mesh come from the file, or one by one from the server.
async function loadCosts() {
  const { mesh, wrap, payload, fabric, algorithm, collective, tile } = state.question;
  const key = [mesh, wrap, payload, fabric, algorithm, collective, tile].join(" ");
  if (costsOf === key) { draw(); return; }
  askingCosts?.abort();
  const { signal } = askingCosts = new AbortController(), found = costs = new Costs();
  costsOf = key;
  if (start.kept) {
    for (const unit of ["chip", "link"])
      (start.kept.heat[unit] ?? []).forEach(([hole, time]) => found.add(hole, time, start.kept.full_s));
    draw();
    return;
  }
  found.isPartial = true;
  let drawn = 0;
  try {
    for await (const answer of ask("heat", state.question, signal)) {
      if (answer.kind !== "heat") continue;
      found.add(answer.hole, answer.time_s, answer.full_s);
      if (state.view.show === "heat" && performance.now() - drawn > 300) { drawn = performance.now(); draw(); }
    }
    found.isPartial = false;
  } catch (error) {
    if (costs === found) costsOf = "";
    if (!signal.aborted) setProblem(error.message);
  }
  if (state.view.show === "heat" && costs === found) draw();
}

function showView(show) {
  isGrowing = false;
  if (show !== "schedule") player.stop();
  state.view.show = byId("show").value = show;
  history.replaceState(null, "", state.fragment());
  draw();
  if (show === "schedule") loadTimeline();
  if (show === "hops") loadHops();
  if (show === "heat") loadCosts();
}

async function loadTimeline() {
  if (!model?.plan) return;
  const asked = number, slice = player.slice();
  try {
    const answer = await askOnce("timeline", { ...state.question, stage: model.plan.stage, slice },
      "timeline", asking.signal);
    if (asked === number) player.load(answer);
  } catch (error) { if (asked === number) setProblem(error.message); }
}

async function loadHops() {
  if (!model) return;
  const chip = cursor, asked = number;
  if (chip < 0 || model.failed.chips.has(chip)) { hops = null; draw(); return; }
  try {
    const answer = await askOnce("next-hops",
      { ...state.question, chip: model.geometry.coordinates(chip) }, "next-hops", asking.signal);
    if (asked !== number || chip !== cursor) return;
    hops = answer;
    draw();
  } catch (error) { if (asked === number) setProblem(error.message); }
}

// What a click or Enter does at a place: fails what is alive, repairs what failed.
function act(chip, link) {
  const tool = document.querySelector("input[name=tool]:checked").value, { geometry, failed } = model;
  const isFresh = start.kept && !isFailed(tool, chip, link); // the hole before is repaired
  const chips = new Set(isFresh ? [] : failed.chips), links = new Set(isFresh ? [] : failed.links);
  const slow = new Map(isFresh ? [] : model.slow);
  if (tool === "look" || state.view.show === "hops") { lookAt(chip); return; }
  if (job) { injectAt(tool, chip, link); return; }
  if (tool === "link" || tool === "slow") {
    if (!link) return;
    const isBroken = isFailed(tool, chip, link);
    links.delete(link);
    slow.delete(link);
    if (!isBroken && tool === "link") links.add(link);
    else if (!isBroken) slow.set(link, SLOW_SPEED);
  } else {
    const isDead = isFailed(tool, chip, link);
    hitBy(tool, chip).forEach((each) => { if (isDead) chips.delete(each); else chips.add(each); });
  }
  if (chips.size === geometry.nChips) { setProblem("A mesh needs at least one live chip."); return; }
  const words = { fail: failureWords(chips, links, geometry), slow: slowWords(slow, geometry) };
  if (state.change(words)) apply();
  describe(chip);
}

function hitBy(tool, chip) {
  return tool === "chip" ? [chip] : model.geometry.region(chip, start.regions[tool]);
}

function isFailed(tool, chip, link) {
  const { chips, links } = model.failed;
  if (tool === "slow") return model.slow.has(link);
  return tool === "link" ? links.has(link) : tool !== "look" && hitBy(tool, chip).every((each) => chips.has(each));
}

// In a live job a click injects the chosen fault.
async function injectAt(tool, chip, link) {
  if (tool === "link" && !link) return;
  const { geometry } = model, kind = byId("fault").value;
  const chips = tool === "chip" ? [chip] : geometry.region(chip, start.regions.board);
  const what = tool === "link" ? failureWords(new Set(), new Set([link]), geometry)[0]
    : failureWords(new Set(chips), new Set(), geometry)[0];
  const verb = tool === "link" ? (kind === "repair" ? "repair" : "cut") : kind;
  const response = await fetch("fault", { method: "POST", body: JSON.stringify({ fault: `${verb} ${what}` }) });
  if (!response.ok) setProblem((await response.json()).why);
  else setStatus(`Asked for: ${verb} ${what}.`);
}

// A page that was opened with a mesh that there is not has no chips.
function chipAt(x, y) { return model ? model.geometry.chipNear(x, y) : -1; }

function click(x, y) {
  const chip = chipAt(x, y);
  if (chip < 0) return;
  cursor = chip;
  act(chip, model.geometry.linkNear(x, y));
}

function hover(x, y) {
  const chip = chipAt(x, y);
  if (chip >= 0 && document.activeElement !== byId("canvas")) describe(chip);
}

function lookAt(chip) {
  cursor = chip;
  describe(chip);
  if (state.view.show === "hops") loadHops();
  if (state.view.show === "schedule") drawSchedule(); else drawCursor();
}

function describe(chip) {
  const { geometry, failed, plan } = model, name = geometry.name(chip);
  if (failed.chips.has(chip)) { byId("cursor").textContent = `Chip ${name}: failed`; return; }
  const loads = [];
  for (let port = 0; plan && port < geometry.nPorts; port++) {
    const there = geometry.neighbour(chip, port);
    if (there >= 0) loads.push(`to ${geometry.name(there)} ${(plan.loads[chip * geometry.nPorts + port] ?? 0).toFixed(2)}`);
  }
  const state = model.stateOf?.(chip) ?? (model.stranded.has(chip) ? "cut off" : tileWords(plan?.tiling, chip));
  byId("cursor").textContent = `Chip ${name}: ${state}`
    + (loads.length ? `; sends, × the payload: ${loads.join(", ")}` : "");
}

function tileWords(tiling, chip) {
  if (!tiling) return "alive";
  return tiling.tile_of[chip] < 0 ? "spare" : `tile ${tiling.tile_of[chip]}, colour ${tiling.colour_of[chip]}`;
}

function keyed(event) {
  if (!model) return;
  const { geometry } = model, layer = geometry.rows * geometry.columns;
  const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -geometry.columns, ArrowDown: geometry.columns,
    PageUp: -layer, PageDown: layer };
  if (event.key in steps) {
    const from = cursor < 0 ? 0 : cursor, to = cursor < 0 ? 0 : cursor + steps[event.key];
    const isSideways = Math.abs(steps[event.key]) === 1;
    const isInside = to >= 0 && to < geometry.nChips && (!isSideways
      || Math.floor(to / geometry.columns) === Math.floor(from / geometry.columns))
      && (Math.abs(steps[event.key]) !== geometry.columns || isSideways
        || geometry.layerOf(to) === geometry.layerOf(from));
    if (isInside) lookAt(to);
  } else if (event.key === "Enter" || event.key === " ") {
    if (cursor >= 0) act(cursor, linkToTheRight(cursor));
  } else if (event.key === "+" || event.key === "=") view.zoom(1.25);
  else if (event.key === "-") view.zoom(0.8);
  else if (event.key === "0") view.fit();
  else return;
  event.preventDefault();
}

// With the keyboard the tool for links acts on the link to the right, else the one downwards.
function linkToTheRight(chip) {
  const { geometry } = model;
  for (const port of [geometry.nPorts - 1, geometry.nPorts - 3]) {
    const there = port >= 0 ? geometry.neighbour(chip, port) : -1;
    if (there >= 0) return `${Math.min(chip, there)}-${Math.max(chip, there)}`;
  }
  return "";
}

function listen() {
  byId("question").addEventListener("submit", (event) => {
    event.preventDefault();
    const changes = Object.fromEntries(TEXTS.map((name) => [name, byId(name).value.trim()]));
    for (const name of ["fail", "slow"]) changes[name] = byId(name).value.split(/[\s;]+/).filter(Boolean);
    const [work, tile = ""] = byId("work").value.split(" "), collective = tile ? "allreduce" : work;
    if (work && (tile !== state.question.tile || collective !== state.question.collective))
      Object.assign(changes, { collective, tile, algorithm: "auto" });
    if (changes.mesh !== state.question.mesh) Object.assign(changes, keptFailures(changes));
    if (state.change(changes) || event.submitter) apply(); // a field that was only left asks nothing
  });
  for (const name of [...TEXTS, "fail", "slow", "work"])
    byId(name).addEventListener("change", () => byId("question").requestSubmit());
  byId("undo").addEventListener("click", () => { if (state.undo()) apply(); });
  byId("redo").addEventListener("click", () => { if (state.redo()) apply(); });
  byId("repair").addEventListener("click", () => { if (state.change({ fail: [], slow: [] })) apply(); });
  byId("copy").addEventListener("click", async () => {
    await navigator.clipboard?.writeText(location.href).catch(() => {});
    setStatus(start.kept ? "The address restores this hole; it is copied."
      : "The address restores this question while the explorer runs; it is copied.");
  });
  byId("show").addEventListener("change", () => showView(byId("show").value));
  byId("machine").addEventListener("change", () => {
    const machine = start.machines.find(({ name }) => name === byId("machine").value);
    if (!machine) return;
    const { mesh, wrap, fabric } = machine;
    if (state.change({ mesh, wrap, fabric, fail: [], slow: [] })) apply();
  });
  byId("layer").addEventListener("change", showLayer);
  byId("phase").addEventListener("change", () => { fillParts(); draw(); });
  byId("part").addEventListener("change", draw);
  byId("zoom-in").addEventListener("click", () => view.zoom(1.25));
  byId("zoom-out").addEventListener("click", () => view.zoom(0.8));
  byId("fit").addEventListener("click", () => view.fit());
  byId("canvas").addEventListener("keydown", keyed);
  document.addEventListener("keydown", (event) => {
    if (!(event.ctrlKey || event.metaKey) || event.key.toLowerCase() !== "z") return;
    if (event.target instanceof HTMLInputElement && event.target.type === "text") return;
    if (event.shiftKey ? state.redo() : state.undo()) apply();
    event.preventDefault();
  });
  addEventListener("hashchange", () => { if (state.read(location.hash)) apply(); });
  onThemeChange(() => { draw(); showCurve(curves); });
  listenToDownloads();
}

// Failures that still fit when the shape changes; the others are left out.
function keptFailures(changes) {
  try {
    const shape = parseShape(changes.mesh), geometry = new Geometry(shape, parseWrap(changes.wrap, shape.length));
    const fits = (parse) => (word) => { try { parse([word], geometry, start.regions); return true; } catch { return false; } };
    return { fail: changes.fail.filter(fits(parseFailures)), slow: changes.slow.filter(fits(parseSlow)) };
  } catch { return {}; }
}

function listenToDownloads() {
  const name = () => `meshmend-${state.question.mesh}-${model?.plan?.algorithm ?? "mesh"}`;
  byId("get-plan").addEventListener("click", async () => {
    if (!model?.plan) return;
    try {
      const answer = await askOnce("plan-file", { ...state.question, stage: model.plan.stage }, "plan-file");
      download(`${name()}.json`, "application/json", [`${JSON.stringify(answer.document)}\n`]);
    } catch (error) { setProblem(error.message); }
  });
  byId("get-svg").addEventListener("click", () => {
    if (model) download(`${name()}.svg`, "image/svg+xml",
      [svgText([...scene, ...view.overlay], model.geometry, byId("canvas").getAttribute("aria-label"))]);
  });
  byId("get-png").addEventListener("click", () => byId("canvas").toBlob((blob) =>
    download(`${name()}.png`, "image/png", [blob])));
  byId("get-csv").addEventListener("click", () => {
    if (!model) return;
    const { geometry, plan } = model, lines = [["from", "to", "times the payload"]];
    plan?.loads.forEach((load, channel) => {
      const chip = Math.floor(channel / geometry.nPorts);
      const there = geometry.neighbour(chip, channel % geometry.nPorts);
      if (there >= 0) lines.push([geometry.name(chip), geometry.name(there), load]);
    });
    download(`${name()}-loads.csv`, "text/csv", [csv(lines)]);
  });
  byId("get-table").addEventListener("click", () => download(`${name()}-algorithms.csv`, "text/csv",
    [csv([["algorithm", "time_s", "limit_s", "slices", "chips", "detail"], ...rows.map((row) =>
      [row.name, row.time_s ?? "", model?.plan?.limit_s ?? "", row.slices ?? "", row.chips ?? "",
        row.detail ?? row.why])])]));
  byId("get-hops").addEventListener("click", () => { if (hops) download(`${name()}-next-hops.csv`, "text/csv",
    [csv([["to", "leaves", "by chip", "hops", "virtual channel"], ...hopRows(hops, model.geometry)])]); });
}

main().catch((error) => setProblem(`The explorer cannot start: ${error.message}`));
