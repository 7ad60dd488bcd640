// Refusals of a call that has a record. They carry its ID, so that the caller can look it up.
import { Fault, type FaultDetail, type FaultKind } from "../../core/fault.ts";

interface ResponseExtras extends Pick<FaultDetail, "retryAfterSeconds"> {
  readonly headers?: Readonly<Record<string, string>>;
}

export function faultOf(
  kind: FaultKind,
  message: string,
  id: string,
  { headers, ...detail }: ResponseExtras = {},
): Fault {
  const named = { ...headers, "x-service-invocation-id": id };
  return new Fault(kind, message, { ...detail, answer: { body: { error: message }, headers: named } });
}

/** Adds the invocation's ID to any Fault of the work. */
export async function withId<T>(id: string, work: Promise<T>): Promise<T> {
  try {
    return await work;
  } catch (error) {
    if (!(error instanceof Fault)) throw error;
    const { kind, message, retryAfterSeconds, answer } = error;
    const detail = {
      headers: answer?.headers ?? {},
      ...(retryAfterSeconds !== undefined && { retryAfterSeconds }),
    };
    throw faultOf(kind, message, id, detail);
  }
}

/** The key or payment belongs to a call that was sent to the agent's other path. */
export function otherPath(id: string): Fault {
  return faultOf("conflict", "this key or payment belongs to a call on the agent's other path", id);
}
