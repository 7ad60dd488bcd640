// A shell script imported as text, so that the binary carries it.
declare module "*.sh" {
  const text: string;
  export default text;
}
