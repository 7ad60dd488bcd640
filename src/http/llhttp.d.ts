// The parser of Node.js as undici ships it, without a type of its own.
declare module "undici/lib/llhttp/llhttp-wasm.js" {
  /** A WebAssembly module in binary form. */
  const binary: Uint8Array<ArrayBuffer>;
  export default binary;
}
