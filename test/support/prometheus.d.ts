// The package ships no types; this is what the tests use of it.
declare module "parse-prometheus-text-format" {
  interface Family {
    readonly name: string;
    readonly help: string;
    /** In capitals. */
    readonly type: string;
    readonly metrics: readonly { readonly value: string; readonly labels?: Readonly<Record<string, string>> }[];
  }
  export default function parse(text: string): readonly Family[];
}
