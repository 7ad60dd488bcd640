// The search of the manual, in the reader's browser: all words of the field must stand in a section, those whose
// heading has them come first. "/" leads to the field, arrows to the results, Enter opens, Escape ends it.
const SHOWN_MAX = 12;
const AROUND = 60;

const field = document.getElementById("search");
const found = document.getElementById("found");
/** The site's folder: this script stands in it, wherever the page does. */
const site = new URL(".", document.currentScript.src);

let loading = null;

/** Read when the field is first used. A failure is forgotten, so that the next key tries again. */
function sections() {
  loading ??= fetch(new URL("search.json", site))
    .then((answer) => answer.json())
    .catch(() => {
      loading = null;
      return [];
    });
  return loading;
}

function rankOf(section, words) {
  const title = section.title.toLowerCase();
  const all = `${title} ${section.text.toLowerCase()}`;
  if (!words.every((word) => all.includes(word))) return -1;
  return words.filter((word) => title.includes(word)).length;
}

function excerptOf(text, word) {
  const at = Math.max(0, text.toLowerCase().indexOf(word));
  const start = Math.max(0, at - AROUND);
  const end = Math.min(text.length, at + AROUND * 2);
  return `${start > 0 ? "…" : ""}${text.slice(start, end)}${end < text.length ? "…" : ""}`;
}

function itemOf(section, words) {
  const link = document.createElement("a");
  link.href = new URL(section.anchor === "" ? section.page : `${section.page}#${section.anchor}`, site).href;
  const title = document.createElement("b");
  title.textContent = `${section.page}: ${section.title}`;
  const excerpt = document.createElement("span");
  excerpt.textContent = excerptOf(section.text, words[0]);
  link.append(title, excerpt);
  link.addEventListener("click", close);
  const item = document.createElement("li");
  item.append(link);
  return item;
}

function close() {
  field.value = "";
  found.hidden = true;
}

async function search() {
  const wanted = field.value;
  const words = wanted.toLowerCase().split(/\s+/).filter(Boolean);
  const all = words.length === 0 ? [] : await sections();
  if (field.value !== wanted) return;
  const hits = all
    .map((section) => ({ section, rank: rankOf(section, words) }))
    .filter(({ rank }) => rank >= 0)
    .sort((one, other) => other.rank - one.rank)
    .slice(0, SHOWN_MAX)
    .map(({ section }) => itemOf(section, words));
  const none = document.createElement("li");
  none.textContent = "Nothing found";
  found.replaceChildren(...(hits.length === 0 ? [none] : hits));
  found.hidden = words.length === 0;
}

/** From the field down into the results, and back up into the field. */
function move(event, step) {
  const stops = [field, ...found.querySelectorAll("a")];
  const next = stops[stops.indexOf(document.activeElement) + step];
  if (next === undefined) return;
  event.preventDefault();
  next.focus();
}

document.addEventListener("keydown", (event) => {
  const isInside = event.target === field || found.contains(event.target);
  if (event.key === "/" && event.target !== field && !event.ctrlKey && !event.metaKey && !event.altKey) {
    event.preventDefault();
    field.focus();
  } else if (event.key === "Escape" && isInside) {
    close();
    field.focus();
  } else if (event.key === "Enter" && event.target === field) {
    found.querySelector("a")?.click();
  } else if (event.key === "ArrowDown" && isInside && !found.hidden) {
    move(event, 1);
  } else if (event.key === "ArrowUp" && isInside) {
    move(event, -1);
  }
});
field.addEventListener("input", search);
field.closest("[role=search]").hidden = false;
