// The question that the page asks, its history, and the address that restores it.

const TEXTS = ["mesh", "wrap", "payload", "fabric", "algorithm", "collective", "tile"];
const LISTS = ["fail", "slow"];
const SHOWN = ["load", "flows", "schedule", "heat", "hops"];

export class State {
  constructor(question) {
    this.past = [];
    this.future = [];
    this.question = question;
    this.view = { show: "load", tool: "board" };
  }

  // Returns whether the question changed; the one before can be undone.
  change(changes) {
    const next = { ...this.question, ...changes };
    if (JSON.stringify(next) === JSON.stringify(this.question)) return false;
    this.past.push(this.question);
    this.future = [];
    this.question = next;
    return true;
  }

  undo() { return this.step(this.past, this.future); }

  redo() { return this.step(this.future, this.past); }

  step(from, to) {
    if (!from.length) return false;
    to.push(this.question);
    this.question = from.pop();
    return true;
  }

  fragment() {
    const words = new URLSearchParams();
    TEXTS.forEach((name) => words.set(name, this.question[name]));
    LISTS.forEach((name) => this.question[name].forEach((each) => words.append(name, each)));
    words.set("show", this.view.show);
    return `#${words}`;
  }

  // Takes what a fragment names; what it leaves out stays.
  read(fragment) {
    const words = new URLSearchParams(fragment.replace(/^#/, ""));
    const changes = {};
    TEXTS.forEach((name) => { if (words.has(name)) changes[name] = words.get(name); });
    if ([...words.keys()].length) LISTS.forEach((name) => { changes[name] = words.getAll(name); });
    if (SHOWN.includes(words.get("show"))) this.view.show = words.get("show");
    return this.change(changes);
  }
}
