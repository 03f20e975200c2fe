"use strict";
// Draws every plot of the page, in the page's colours, and lets arrow keys read its points.
const read = (id) => document.getElementById(id).textContent;
const plots = JSON.parse(read("plots"));
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function themed(layout) {
  const grid = { gridcolor: color("--line"), zerolinecolor: color("--line"), linecolor: color("--line") };
  const narrow = window.innerWidth < 480;
  const result = {
    ...layout,
    paper_bgcolor: "rgba(0,0,0,0)",
    plot_bgcolor: "rgba(0,0,0,0)",
    font: { color: color("--text"), family: "system-ui, sans-serif", size: narrow ? 11 : 12 },
    hoverlabel: { bgcolor: color("--card"), bordercolor: color("--line"), font: { color: color("--text") } },
    margin: { l: narrow ? 46 : 60, r: 12, t: 24, b: 80 },
    legend: { orientation: "h", y: 0, yref: "container", yanchor: "bottom", x: 0, ...layout.legend },
    hovermode: "closest",
    dragmode: false,
  };
  for (const name of ["xaxis", "yaxis"]) result[name] = { ...grid, ...layout[name] };
  return result;
}

function chosen(element) {
  const plot = plots[element.dataset.plot];
  if (!plot.choices) return plot.data;
  const select = document.querySelector(`[data-chooses="${element.dataset.plot}"]`);
  return plot.choices[select.selectedIndex].data;
}

function show(element) {
  const layout = themed(plots[element.dataset.plot].layout);
  return Plotly.react(element, structuredClone(chosen(element)), layout, { displayModeBar: false, responsive: true });
}

function fail(element, reason) {
  element.classList.add("failed");
  element.textContent = "This plot could not be drawn: " + reason;
}

// Left and right walk along a curve, up and down change the curve, Escape hides the label.
function walk(element, event) {
  const steps = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] };
  if (event.key === "Escape") return Plotly.Fx.unhover(element);
  if (!(event.key in steps)) return;
  event.preventDefault();
  const curves = element.data.map((t, i) => i).filter((i) => element.data[i].type !== "heatmap" && element.data[i].hoverinfo !== "skip");
  if (!curves.length) return;
  const [up, along] = steps[event.key];
  const at = element.at ?? { curve: 0, point: -1 };
  const curve = (at.curve + up + curves.length) % curves.length;
  const count = element.data[curves[curve]].x.length;
  const point = Math.min(Math.max(at.point + along, 0), count - 1);
  element.at = { curve, point };
  Plotly.Fx.hover(element, [{ curveNumber: curves[curve], pointNumber: point }]);
}

async function library() {
  const packed = Uint8Array.from(atob(read("library")), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
  if (!window.Plotly) throw new Error("plotly did not start");
}

const rest = () => new Promise((done) => setTimeout(done));

async function draw() {
  const elements = [...document.querySelectorAll("[data-plot]")];
  for (const select of document.querySelectorAll("[data-chooses]")) {
    for (const choice of plots[select.dataset.chooses].choices) select.add(new Option(choice.name));
    select.addEventListener("change", () => show(document.getElementById("plot-" + select.dataset.chooses)));
  }
  await rest(); // the tables are painted before plotly is unpacked
  try {
    await library();
  } catch (error) {
    for (const element of elements) fail(element, error.message);
    throw error;
  }
  for (const element of elements) {
    try {
      await show(element);
      element.dataset.drawn = "yes";
      element.addEventListener("keydown", (event) => walk(element, event));
    } catch (error) {
      fail(element, error.message);
      console.error(error);
    }
    await rest();
  }
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => elements.forEach(show));
  document.documentElement.dataset.ready = "yes";
}

draw();
