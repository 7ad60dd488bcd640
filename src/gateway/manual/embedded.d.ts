// Pages, and the style and the script of their site, are imported as text and so become part of the binary.
declare module "*.md" {
  const text: string;
  export default text;
}
declare module "*/style.css" {
  const text: string;
  export default text;
}
declare module "*/search.js" {
  const text: string;
  export default text;
}
