// Case folding for the search over names and descriptions. SQLite folds only ASCII and Postgres folds by locale, so
// both the stored text and the searched one are folded here and compared byte by byte.

/** Keeps a match from running from the name into the description. */
const SEPARATOR = "\u0001";

/** Lower case first, for letters like ẞ that have no upper case of their own; then upper, where ß is SS. */
export function fold(text: string): string {
  return text.replaceAll(SEPARATOR, "").toLowerCase().toUpperCase();
}

export function searchText(agent: { readonly name: string; readonly description: string }): string {
  return `${fold(agent.name)}${SEPARATOR}${fold(agent.description)}`;
}
