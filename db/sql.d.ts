// SQL files are imported as text, with { type: "text" }, and so become part of the binary.
declare module "*.sql" {
  const text: string;
  export default text;
}
