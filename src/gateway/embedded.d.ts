// Pages, and styles and scripts of the reader's browser, are imported as text and so become part of the binary.
declare module "*.md" {
  const text: string;
  export default text;
}
declare module "*.css" {
  const text: string;
  export default text;
}
declare module "*/copy.js" {
  const text: string;
  export default text;
}
declare module "*/search.js" {
  const text: string;
  export default text;
}
/** @see ./manual/render/highlight.js */
declare module "*/highlight.js" {
  export function highlight(code: string, language: string): string | null;
}
/** @see ./manual/find.js */
declare module "*/find.js" {
  import type { default as MiniSearch, Options, SearchResult } from "minisearch";
  export const OPTIONS: Options;
  export function find(index: MiniSearch, wanted: string): SearchResult[];
  const path: string;
  export default path;
}
declare module "*/initializer.js" {
  const text: string;
  export default text;
}
// A file imported `with { type: "file" }` is embedded in the binary, and its import is the path to it.
declare module "swagger-ui-dist/*" {
  const path: string;
  export default path;
}
