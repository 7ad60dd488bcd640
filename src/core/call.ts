// The call as it was accepted: stored with the invocation until it has been made, so a later change of the
// agent does not reach it. It survives JSON and a structured clone.
import type { Protocol } from "./states.ts";

export interface Call {
  readonly url: string;
  readonly protocol: Protocol;
  readonly mcp_protocol_version: string | null;
  readonly credential_ref: string | null;
  readonly capture: boolean;
  /** Whether its receipt will say what came back: then the response is hashed. */
  readonly receipt: boolean;
  /** Headers of the caller that pass to the upstream, names in lower case. */
  readonly headers: ReadonlyArray<readonly [name: string, value: string]>;
  readonly request_id: string;
}
