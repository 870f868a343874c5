"use strict";
// Sorts the table by the column whose head is pressed, a second press reverses the order; rows without a value stay last.
// The heads are not <button>s: Chromium repeats a table's head on each printed page only where it holds none.
for (const table of document.querySelectorAll("table")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const sort = () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      const numeric = head.classList.contains("number");
      const value = (row) => row.cells[column].dataset.value;
      const rows = [...table.tBodies[0].rows].sort((one, other) => {
        const [a, b] = [value(one), value(other)];
        if (a === undefined || b === undefined) return (a === undefined) - (b === undefined);
        const order = numeric ? a - b : a.localeCompare(b, "en", { numeric: true });
        return down ? -order : order;
      });
      heads.forEach((each) => each.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      table.tBodies[0].append(...rows);
    };
    const button = head.querySelector("span");
    button.setAttribute("role", "button");
    button.tabIndex = 0;
    button.addEventListener("click", sort);
    button.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      sort();
    });
  });
}
