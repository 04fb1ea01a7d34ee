"""What every layer stands on: the ranks, the device, collectives, trees and protocols. Import from its modules."""
