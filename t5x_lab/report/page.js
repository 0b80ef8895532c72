// What the buttons of the page do: another axis under all charts, a run hidden in all of them, a command copied.
const charts = () => (window.Bokeh ? Bokeh.documents.flatMap((doc) => doc.roots()) : []);
const press = (button, on) => button.setAttribute("aria-pressed", on);

document.querySelectorAll("[data-axis]").forEach((button) =>
  button.addEventListener("click", () => {
    document.querySelectorAll("[data-axis]").forEach((other) => press(other, other === button));
    for (const chart of charts()) {
      for (const drawn of chart.renderers) if (drawn.glyph.tags.length) drawn.glyph.x = { field: button.dataset.axis };
      chart.below.find((part) => "axis_label" in part).axis_label = button.dataset.label;
      chart.reset.emit();
    }
  }),
);

document.querySelectorAll("[data-run]").forEach((button) =>
  button.addEventListener("click", () => {
    const shown = button.getAttribute("aria-pressed") !== "true";
    press(button, shown);
    for (const chart of charts())
      for (const drawn of chart.renderers) if (drawn.glyph.tags.includes(button.dataset.run)) drawn.visible = shown;
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
if (whole && matchMedia("(pointer: fine)").matches) {
  whole.hidden = false;
  whole.addEventListener("click", () => charts().forEach((chart) => chart.reset.emit()));
  addEventListener("load", () =>
    setTimeout(() => {
      for (const chart of charts())
        for (const tool of chart.toolbar.tools) if (tool.type === "BoxZoomTool") tool.active = true;
    }, 500),
  );
}
