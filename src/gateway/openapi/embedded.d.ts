// A file imported `with { type: "file" }` is embedded in the binary, and its import is the path to it.
declare module "swagger-ui-dist/*" {
  const path: string;
  export default path;
}
