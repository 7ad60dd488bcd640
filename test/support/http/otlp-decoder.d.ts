// The part of the generated code that the tests use. Its own types lack the class of a request's decoder.
declare module "otlp-decoder/build/src/generated/root.js" {
  interface Decoder {
    decode(bytes: Uint8Array): unknown;
    toObject(message: unknown, options: object): unknown;
  }
  const root: {
    readonly opentelemetry: {
      readonly proto: {
        readonly collector: { readonly trace: { readonly v1: { readonly ExportTraceServiceRequest: Decoder } } };
      };
    };
  };
  export default root;
}
