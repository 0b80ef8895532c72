// What the buttons of the page do: another axis under all charts, a run hidden in all of them, a command copied.
const charts = () => (window.Bokeh ? Bokeh.documents.flatMap((doc) => doc.roots()) : []);
const whenDrawn = (then) => (charts().length ? then() : setTimeout(whenDrawn, 50, then));
const hasRuns = () => !document.querySelector("[data-run]") || document.querySelector('[data-run][aria-pressed="true"]');
const reset = () => hasRuns() && charts().forEach((chart) => chart.reset.emit()); // of nothing there is no range
const press = (button, on) => button.setAttribute("aria-pressed", on);

// Words, axes and legends of charts in the page's colors, light or dark.
const paint = () => {
  const of = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const color = of("--soft");
  for (const chart of charts()) {
    for (const part of [...chart.below, ...chart.left, ...chart.center]) {
      if ("axis_label" in part) {
        part.axis_label_text_color = part.major_label_text_color = color;
        part.axis_line_color = part.major_tick_line_color = part.minor_tick_line_color = color;
      }
      if ("label_text_color" in part) {
        part.label_text_color = color;
        part.background_fill_color = of("--panel");
        part.background_fill_alpha = 0.8;
      }
    }
  }
};
if (window.Bokeh) whenDrawn(paint);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", paint);

document.querySelectorAll("[data-axis]").forEach((button) =>
  button.addEventListener("click", () => {
    document.querySelectorAll("[data-axis]").forEach((other) => press(other, other === button));
    for (const chart of charts()) {
      for (const drawn of chart.renderers) if (drawn.glyph.tags.length) drawn.glyph.x = { field: button.dataset.axis };
      chart.below.find((part) => "axis_label" in part).axis_label = button.dataset.label;
    }
    setTimeout(reset); // once Bokeh has taken the other numbers, which it does a moment later
  }),
);

document.querySelectorAll("[data-run]").forEach((button) =>
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    press(button, shown);
    for (const chart of charts())
      for (const drawn of chart.renderers) if (drawn.glyph.tags.includes(button.dataset.run)) drawn.visible = shown;
    setTimeout(reset);
  }),
);

document.querySelectorAll(".copy").forEach((button) =>
  button.addEventListener("click", async () => {
    const code = button.parentElement.querySelector("code");
    if (!navigator.clipboard) return getSelection().selectAllChildren(code); // a page of plain http from elsewhere
    await navigator.clipboard.writeText(code.textContent);
    button.textContent = "copied";
    setTimeout(() => (button.textContent = "copy"), 1500);
  }),
);

// With a mouse a drag selects what to come closer to; a finger scrolls the page.
const whole = document.querySelector("#whole");
if (whole && window.Bokeh && matchMedia("(pointer: fine)").matches) {
  whole.hidden = false;
  whole.addEventListener("click", reset);
  whenDrawn(() => {
    for (const chart of charts())
      for (const tool of chart.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = true;
  });
}
