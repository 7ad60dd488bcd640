// An error that ends the demo. Only its message is shown.

export class DemoProblem extends Error {
  override readonly name = "DemoProblem";
}
