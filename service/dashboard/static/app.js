"use strict";
// The dashboard: events of /events into canvases and uPlot charts. Times are seconds, as sent.

const KEEP = 300;
const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const byId = (id) => document.getElementById(id);
const palette = ["#2563c9", "#c2571a", "#5b7f1f", "#8a4fbf", "#b3261e", "#12808a", "#a37c00",
  "#c13d86", "#3f4a5c", "#5fa8d3"];
const points = [];
const charts = [];
let state = null;

function element(tag, text, className) {
  const made = document.createElement(tag);
  if (text !== undefined) made.textContent = text;
  if (className) made.className = className;
  return made;
}

// ------------------------------------------------------------------ charts

function chart(id, unit, series, bands) {
  const box = byId(id);
  const made = {
    box, series, plot: null,
    draw() {
      const shown = series(points);
      box.classList.toggle("none", shown.length === 0);
      if (!shown.length) { if (this.plot) { this.plot.destroy(); this.plot = null; } return; }
      const data = [points.map((p) => p.time), ...shown.map((s) => s.values)];
      if (this.plot && this.plot.series.length !== data.length) {
        this.plot.destroy();
        this.plot = null;
      }
      if (this.plot) { this.plot.setData(data); return; }
      const axis = { stroke: css("--faint"), grid: { stroke: css("--line"), width: 1 },
        ticks: { stroke: css("--line") }, font: "11px system-ui" };
      this.plot = new uPlot({
        width: box.clientWidth, height: 150, cursor: { y: false },
        scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
        axes: [axis, { ...axis, size: 76, values: (_, v) => v.map((x) => `${+x.toPrecision(4)} ${unit}`) }],
        series: [{}, ...shown.map((s, i) => ({
          label: s.label, stroke: palette[i % palette.length], width: 1.5, spanGaps: false,
          value: (_, v) => (v == null ? "–" : `${v.toPrecision(4)} ${unit}`),
        }))],
        hooks: bands ? { drawClear: [bands] } : {},
      }, data, box);
    },
  };
  charts.push(made);
  return made;
}

const column = (name, scale = 1) => points.map((p) => (p[name] == null ? null : p[name] * scale));

function perRank(name, scale, label) {
  const ranks = Math.max(0, ...points.map((p) => (p[name] || []).length));
  const out = [];
  for (let r = 0; r < ranks; r++) {
    const values = points.map((p) => {
      const value = (p[name] || [])[r];
      return value == null ? null : value * scale;
    });
    if (values.some((v) => v != null)) out.push({ label: `${label} ${r}`, values });
  }
  return out;
}

function throttleBands(plot) {
  const { ctx, bbox } = plot;
  ctx.save();
  ctx.fillStyle = "rgba(179, 38, 30, 0.18)";
  for (let i = 0; i + 1 < points.length; i++) {
    if (!points[i].throttled) continue;
    const from = plot.valToPos(points[i].time, "x", true);
    const to = plot.valToPos(points[i + 1].time, "x", true);
    ctx.fillRect(from, bbox.top, to - from, bbox.height);
  }
  ctx.restore();
}

chart("queue", "", () => [
  { label: "requests", values: column("queue_requests") },
  { label: "tokens", values: column("queue_tokens") },
]);
chart("latency", "ms", () => [
  { label: "p50", values: column("p50_ms") },
  { label: "p99", values: column("p99_ms") },
]);
chart("throughput", "/s", () => [
  { label: "tokens", values: column("tokens") },
  { label: "requests", values: column("requests") },
  { label: "steps", values: column("steps") },
]);
chart("power", "W", () => perRank("power_watts", 1, "rank"), throttleBands);
chart("clocks", "MHz", () => perRank("sm_clock_hertz", 1e-6, "rank"), throttleBands);

// ------------------------------------------------------------------ canvases

function surface(id, height) {
  const canvas = byId(id);
  const scale = window.devicePixelRatio || 1;
  canvas.style.height = `${height}px`;
  canvas.width = canvas.clientWidth * scale;
  canvas.height = height * scale;
  const ctx = canvas.getContext("2d");
  ctx.scale(scale, scale);
  ctx.font = "11px system-ui, sans-serif";
  ctx.textBaseline = "middle";
  return { ctx, width: canvas.clientWidth, height };
}

function drawTimeline(step) {
  const spans = step ? step.spans : [];
  const roles = [...new Set(spans.map((s) => s[2]))];
  const tracks = [...new Set(spans.map((s) => `${s[0]}:${s[1]}`))].sort((a, b) => {
    const [ra, ua] = a.split(":").map(Number), [rb, ub] = b.split(":").map(Number);
    return ra - rb || ua - ub;
  });
  const row = tracks.length > 40 ? 5 : 18;
  const { ctx, width } = surface("timeline", Math.max(40, tracks.length * row + 20));
  const left = 90;
  const end = Math.max(1, ...spans.map((s) => s[3] + s[4]));
  const x = (us) => left + (us / end) * (width - left - 8);
  ctx.fillStyle = css("--faint");
  tracks.forEach((track, i) => {
    const [rank, unit] = track.split(":");
    if (row >= 12 || unit === "-1") {
      ctx.fillText(unit === "-1" ? `rank ${rank} host` : `rank ${rank} unit ${unit}`, 0,
        i * row + row / 2);
    }
  });
  // Roles of a unit overlap: what is short lies on top of what is long, or nobody would see it.
  for (const [rank, unit, role, start, length] of spans.toSorted((a, b) => b[4] - a[4])) {
    ctx.fillStyle = palette[roles.indexOf(role) % palette.length];
    const y = tracks.indexOf(`${rank}:${unit}`) * row;
    ctx.fillRect(x(start), y + 1, Math.max(1, x(start + length) - x(start)), row - 2);
  }
  ctx.fillStyle = css("--faint");
  for (let i = 0; i <= 4; i++) {
    const us = (end * i) / 4;
    ctx.textAlign = i === 4 ? "right" : i === 0 ? "left" : "center";
    ctx.fillText(us >= 1000 ? `${(us / 1000).toFixed(1)} ms` : `${us.toFixed(0)} µs`, x(us),
      tracks.length * row + 10);
  }
  ctx.textAlign = "left";
  byId("roles").replaceChildren(...roles.map((role, i) => {
    const item = element("span", role);
    const mark = element("i");
    mark.style.background = palette[i % palette.length];
    item.prepend(mark);
    return item;
  }));
}

function drawExperts(step, layer) {
  const counts = step ? step.expert_counts : [];
  const ranks = layer ? layer.num_ranks : 0;
  const { ctx, width } = surface("experts", Math.max(40, ranks * 26 + 18));
  if (!counts.length || !ranks) return;
  const local = counts.length / ranks;
  const most = Math.max(1, ...counts);
  const left = 50;
  const cell = (width - left) / local;
  for (let e = 0; e < counts.length; e++) {
    const rank = Math.floor(e / local);
    ctx.globalAlpha = 0.08 + 0.92 * (counts[e] / most);
    ctx.fillStyle = css("--a");
    ctx.fillRect(left + (e % local) * cell, rank * 26, Math.max(1, cell - 1), 24);
    if (cell > 22) {
      ctx.globalAlpha = 1;
      ctx.fillStyle = counts[e] > most / 2 ? "#fff" : css("--ink");
      ctx.fillText(String(counts[e]), left + (e % local) * cell + 4, rank * 26 + 12);
    }
  }
  ctx.globalAlpha = 1;
  ctx.fillStyle = css("--faint");
  for (let r = 0; r < ranks; r++) ctx.fillText(`rank ${r}`, 0, r * 26 + 12);
  ctx.fillText(`local expert 0 … ${local - 1}, most routes ${most}`, left, ranks * 26 + 8);
}

function drawRings(step, layer) {
  const rows = [];
  (step ? step.high_water : []).forEach((water, rank) => {
    water.forEach((used, ring) => {
      const size = layer.ring_blocks[ring];
      const row = element("div", undefined, used >= size ? "ring full" : "ring");
      const bar = element("div");
      const fill = element("b");
      fill.style.width = `${Math.min(100, (100 * used) / size)}%`;
      bar.append(fill);
      row.append(element("span", `rank ${rank} L${ring + 1}`), bar,
        element("span", `${used} / ${size}`));
      rows.push(row);
    });
  });
  byId("rings").replaceChildren(...(rows.length ? rows : [element("p", "no step yet", "none")]));
}

function drawAttention(attention, info) {
  byId("attention-panel").hidden = !attention;
  if (!attention) return;
  const { step, sequences, pages_used: used, pages } = attention;
  byId("attention-info").textContent =
    `${info.name} · H ${info.hidden}, ${info.num_heads} heads, ${info.index_heads} index heads · ` +
    `rank 0, ${info.backend} · ${sequences} sequence${sequences === 1 ? "" : "s"}` +
    (step ? ` · step ${step.step}, ${step.num_tokens} tokens: layer ` +
      `${(step.kernel_s * 1e3).toFixed(2)} ms, host ${(step.host_s * 1e3).toFixed(2)} ms` : "");
  const row = element("div", undefined, used >= pages ? "ring full" : "ring");
  const bar = element("div");
  const fill = element("b");
  fill.style.width = `${(100 * used) / pages}%`;
  bar.append(fill);
  row.append(element("span", "cache pages"), bar, element("span", `${used} / ${pages}`));
  byId("pages").replaceChildren(row);
}

// ------------------------------------------------------------------ the rest

function drawState() {
  if (!state) return;
  const { status, layer, step, load, telemetry, faults } = state;
  byId("state").textContent = status.state;
  byId("state").className = `badge ${status.state}`;
  byId("reason").textContent = status.reason;
  byId("layer").textContent = layer
    ? `${layer.name} · H ${layer.hidden}, I ${layer.inter}, ${layer.num_experts} experts, ` +
      `top-${layer.topk}, ${layer.weight_dtype} · ${layer.num_ranks} ${layer.backend} ranks · ` +
      `group ${status.generation}`
    : "";
  byId("step-info").textContent = step
    ? `${step.num_requests ? `step ${step.step}, ${step.num_requests} requests, ` : "heartbeat, "}` +
      `${step.num_tokens} tokens: layer ${(step.kernel_s * 1e3).toFixed(2)} ms, ` +
      `host ${(step.host_s * 1e3).toFixed(2)} ms`
    : "none yet";
  byId("load-info").textContent = load
    ? `max/mean ${load.max_over_mean.toFixed(2)}, Gini ${load.gini.toFixed(2)}, ` +
      `${load.empty} empty`
    : "";
  drawTimeline(step);
  drawExperts(step, layer);
  if (layer) drawRings(step, layer);
  drawAttention(state.attention, layer && layer.attention);
  const missing = [...new Set(telemetry.map((t) => t.unavailable).filter(Boolean))];
  byId("telemetry-info").textContent = !telemetry.length
    ? "no reading yet"
    : missing.length ? `unavailable: ${missing.join("; ")}` : telemetry[0].device;
  byId("events").replaceChildren(...telemetry.flatMap((t) =>
    Object.entries(t.clocks_events || {}).filter(([, on]) => on)
      .map(([reason]) => element("span", `rank ${t.rank}: ${reason}`,
        reason === "gpu_idle" ? "" : "on"))));
  byId("faults").tBodies[0].replaceChildren(...(faults.length ? faults.map((f) => {
    const row = element("tr");
    row.append(element("td", new Date(f.time * 1000).toLocaleTimeString()),
      element("td", f.kind), element("td", `rank ${f.rank}`), element("td", f.message));
    return row;
  }) : [element("tr")]));
  if (!faults.length) {
    byId("faults").tBodies[0].rows[0].append(element("td", "none since the service started", "none"));
  }
}

function add(point) {
  points.push(point);
  if (points.length > KEEP) points.shift();
}

const drawCharts = () => charts.forEach((c) => c.draw());
const source = new EventSource("/events");
source.addEventListener("history", (e) => {
  points.length = 0;
  JSON.parse(e.data).forEach(add);
  drawCharts();
});
source.addEventListener("point", (e) => { add(JSON.parse(e.data)); drawCharts(); });
source.addEventListener("state", (e) => { state = JSON.parse(e.data); drawState(); });
source.onerror = () => {
  byId("state").textContent = "no connection";
  byId("state").className = "badge lost";
};
window.addEventListener("resize", () => {
  charts.forEach((c) => c.plot && c.plot.setSize({ width: c.box.clientWidth, height: 150 }));
  drawState();
});
