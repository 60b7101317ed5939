// A page from `milepost view --serve` asks its own server for news, and keeps the reader's place when there are some.

const LIVE_EVERY_MS = 1000;
const LIVE_RETRY_MS = 2000;

const live = {
  at: "",
  number: 0,
  trouble: "",
  failed: 0,
  turn: 0,

  start() {
    const meta = document.querySelector('meta[name="milepost-live"]');
    this.at = meta.content;
    if (!this.at) return;
    this.number = Number(meta.dataset.number);
    byId("live").hidden = false;
    this.show("live");
    this.ask();
    document.addEventListener("visibilitychange", () => document.hidden || this.ask());
  },

  async ask() {
    clearTimeout(this.waiting);
    if (document.hidden || this.isAsking) return;
    this.isAsking = true;
    try {
      const state = await this.fetch("state");
      this.failed = 0;
      if (state.number !== this.number) await this.renew();
      this.grow();
      this.show(state.trouble ? "trouble" : "live", state.trouble);
    } catch (error) {
      this.failed += 1;
      if (this.failed > 1) this.show("gone", "The server does not answer. The page shows what it told last.");
      if (error instanceof TypeError === false) console.warn(shown(error?.message ?? error));
    }
    this.isAsking = false;
    this.waiting = setTimeout(() => this.ask(), this.failed ? LIVE_RETRY_MS : LIVE_EVERY_MS);
  },

  /** Ages grow while nothing happens. */
  grow() {
    this.turn = (this.turn + 1) % 10;
    if (this.turn || view.tab !== "timeline" || !view.data.steps.length) return;
    showTiles();
    timeline.list.redraw();
  },

  async fetch(name) {
    const answer = await fetch(this.at + name, { cache: "no-store", credentials: "omit", redirect: "error" });
    if (!answer.ok) throw new Error(`the server answered ${answer.status}`);
    return answer.json();
  },

  async renew() {
    const sections = await this.fetch("data");
    await showNews(await PageData.fromTexts(sections));
    this.number = sections.number;
  },

  show(state, text = "") {
    byId("live").dataset.state = state;
    byId("live-text").textContent = { live: "live", trouble: "cannot look", gone: "server gone" }[state];
    const trouble = byId("trouble");
    const told =
      state === "trouble" ? `The run cannot be looked at: ${shown(text)} The page shows what was seen last.` : text;
    if (trouble.textContent !== told) trouble.textContent = told;
    trouble.hidden = !told;
  },
};

/** Show newer data: what is picked stays picked, and what is open stays open. */
async function showNews(data) {
  const old = view.data;
  const picked = old.steps[view.step]?.name;
  const added = data.steps.length - old.steps.length;
  data.adopt(old);
  view.data = data;
  const at = data.steps.findIndex((step) => step.name === picked);
  view.step = view.follows || at < 0 ? newestShown(data) : at;
  showHead();
  showPicks();
  byId(`panel-${view.tab}`).hidden = !data.steps.length;
  if (data.steps.length) for (const name of started) panels[name].renew?.(old);
  startTab();
  await refresh({ scroll: false });
  if (added > 0) announce(`${plural(added, "new step")}, the newest is ${data.label(newestShown(data))}`);
}
