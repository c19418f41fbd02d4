// Light, dark, or as the system says. Loaded before the first paint; the rest of the page uses `pagewiseTheme`.
"use strict";

(() => {
  const KEY = "pagewise-theme";
  const system = matchMedia("(prefers-color-scheme: dark)");

  function chosen() {
    try {
      return localStorage.getItem(KEY) || "system";
    } catch {
      return "system"; // storage is forbidden: the choice lasts as long as the page
    }
  }

  let choice = chosen();

  function apply() {
    const dark = choice === "dark" || (choice === "system" && system.matches);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    dispatchEvent(new Event("themechange"));
  }

  system.addEventListener("change", apply);
  globalThis.pagewiseTheme = {
    get choice() {
      return choice;
    },
    next() {
      choice = { system: "light", light: "dark", dark: "system" }[choice] || "system";
      try {
        localStorage.setItem(KEY, choice);
      } catch {
        // as above
      }
      apply();
      return choice;
    },
  };
  apply();
})();
