// What the benchmark uses of Restate's SDK, which only the benchmark's own install has.
declare module "@restatedev/restate-sdk" {
  interface Context {
    /** Runs a step, whose result is recorded and not made again. */
    run<T>(name: string, step: () => Promise<T>): Promise<T>;
  }
  interface Service {
    readonly name: string;
  }
  export function service(definition: {
    readonly name: string;
    readonly handlers: Readonly<Record<string, (context: Context, body: unknown) => Promise<unknown>>>;
  }): Service;
  /** Gives the port that it listens on. */
  export function serve(options: { readonly services: readonly Service[]; readonly port: number }): Promise<number>;
}
